"""Settings of the objectives: each has those that it reads, and no others exist for it.

``Config.objective`` is one of them, chosen by the setting ``objective``. A custom objective has the
settings of the built-in one that trains the same (steps, a path, or noise levels), and those that
its class declares in ``Settings``. Imports no torch, except for a custom objective.
"""

import pkgutil
from functools import cache
from typing import ClassVar, Literal

from pydantic import create_model, field_validator

from hyvideo.data.custom_code import load_object
from hyvideo.data.examples import (
    PAIRS_FILE,
    Examples,
    file_in_study,
    read_examples,
)
from hyvideo.data.pairs import read_ratings, select_preferences, split_by_prompt
from hyvideo.data.text import nearest, quote
from hyvideo.grpo.trust_region import KLWeights
from hyvideo.settings.sections import MAX_STEPS, Section, learning, machine

# First parts of the names of metrics that the run itself reports.
RESERVED_GROUPS = (
    "advantage anchor by_step cost grad hacking memory perf reward time update validation".split()
)


class ObjectiveSettings(Section):
    """What all objectives have."""

    name: ClassVar[str]  # value of the setting ``objective``
    label: ClassVar[str]  # in reports
    class_path: ClassVar[str] = ""  # module:class of the implementation
    trains: ClassVar[Literal["steps", "path", "levels"]]  # stochastic steps, an ODE path, levels
    has_ratio: ClassVar[bool] = False  # the loss has likelihood ratios
    needs_old_velocities: ClassVar[bool] = False  # later updates need those of the rollout policy
    # setting that names the CSV files of the videos that it trains on; empty: rollouts
    videos_from: ClassVar[str] = ""
    needs_rewards: ClassVar[bool] = True  # rollouts are decoded and scored
    group_size: ClassVar[int] = 0  # num_generations, if the objective decides it

    mini_batch_size_per_update: int = machine(1, "Rollouts per training forward pass.", ge=1)
    gate_interval: int = machine(
        1, "Iterations between on-policy checks, from the first one; 0 disables them.", ge=0
    )
    anchor_path: str = learning(
        "",
        "Fixed anchor: a checkpoint of a run, or a LoRA; default: the initial policy.",
        is_path=True,
    )
    anchor_cfg_scale: float | None = learning(
        None, "Guidance scale of a fixed anchor; default: cfg_scale."
    )

    @property
    def scores_rollouts(self) -> bool:
        """True if the videos of the rollouts are decoded and scored."""
        return self.needs_rewards and not self.videos_from

    def read_videos(self, seed: int) -> Examples:
        """Return the videos that an objective with ``videos_from`` trains on.

        Raises ValueError for files that cannot be used.
        """
        raise NotImplementedError(f"objective {self.name} trains on rollouts")

    # What every run asks for; an objective that lacks the setting has this value.

    @property
    def updates(self) -> int:
        """Updates per iteration."""
        return getattr(self, "num_updates_per_rollout", 1)

    @property
    def window(self) -> str:
        """SDE window of the rollouts."""
        return getattr(self, "sde_window", "")

    @property
    def reward_weight(self) -> float:
        """Weight of the gradient of the reward."""
        return getattr(self, "reward_gradient_weight", 0.0)

    @property
    def strategy(self) -> str:
        """KL strategy; ``none`` also if the coefficient is always 0."""
        return "none"

    @property
    def kl_weights(self) -> KLWeights:
        """Weights of the KL to the anchor and to the rollout policy."""
        name = self.strategy
        if name.startswith("dual"):
            return KLWeights(self.dual_kl_moving_weight, self.dual_kl_step_weight)
        return KLWeights(float(name in ("fixed", "moving")), float(name == "stepwise"))

    @property
    def needs_anchor(self) -> bool:
        """True if the strategy has a KL to the anchor."""
        return self.kl_weights.position != 0

    @property
    def anchor_moves(self) -> bool:
        """True if there is an anchor that is refreshed."""
        return self.needs_anchor and self.strategy.endswith("moving")

    @property
    def measures_velocity(self) -> bool:
        """True if the strategy has a KL to the rollout policy."""
        return self.strategy == "stepwise" or self.strategy.startswith("dual")


class KLCoefficientSettings(ObjectiveSettings):
    """Coefficient of the KL terms over the updates of a run."""

    kl_weight: float = learning(
        1e-5, "Largest coefficient of the KL term; 0: kl_strategy none.", ge=0
    )
    kl_coef: float = learning(1e-7, "Initial and smallest KL coefficient.", ge=0)
    kl_schedule: Literal["constant", "two_stage", "adaptive"] = learning(
        "adaptive", "KL coefficient schedule."
    )
    kl_warmup_updates: int = learning(
        100, "Updates over which the coefficient rises to kl_weight.", ge=0
    )
    kl_target: float | None = learning(None, "Target KL; default: kl_weight.", gt=0)

    @property
    def strategy(self) -> str:
        return "none" if self.kl_weight == 0 else self.kl_strategy


class TrustRegionSettings(KLCoefficientSettings):
    """KL to an anchor, and to the policy of the rollouts."""

    kl_strategy: Literal["none", "fixed", "stepwise", "moving", "dual_moving", "dual_fixed"] = (
        learning(
            "dual_moving",
            "KL terms: to the base model (fixed) or a moving anchor, to the rollout policy "
            "(stepwise), or both.",
        )
    )
    update_ref_model_step: int = learning(10, "Updates between refreshes of a moving anchor.", ge=1)
    dual_kl_moving_weight: float = learning(
        1.0, "Weight of the position KL in dual strategies.", ge=0
    )
    dual_kl_step_weight: float = learning(
        0.1, "Weight of the velocity KL in dual strategies.", ge=0
    )
    anchor_fraction: float = learning(1.0, "Fraction of steps with an anchor KL.", gt=0, le=1)
    num_updates_per_rollout: int = learning(1, "Updates per iteration, each on whole groups.", ge=1)


class TrainedStepsSettings(ObjectiveSettings):
    """Which steps of a rollout are trained, in which order."""

    enable_timestep_permutation: bool = learning(True, "Train a rollout's steps in random order.")
    timestep_fraction: float = learning(
        1.0,
        "Fraction of the stochastic steps to train: random steps or, without permutation, the "
        "noisiest.",
        gt=0,
        le=1,
    )


class RewardGradientSettings(ObjectiveSettings):
    """Gradient of the reward through scorer and VAE."""

    reward_gradient_weight: float = learning(
        0.0, "Weight of the reward's gradient through scorer and VAE; 0: off.", ge=0
    )


class GRPOSettings(TrainedStepsSettings, TrustRegionSettings):
    """Clipped likelihood ratios of the sampled steps."""

    name = "grpo"
    label = "GRPO"
    class_path = "hyvideo.training.objectives.grpo:GRPO"
    trains = "steps"
    has_ratio = True

    clip_range: float = learning(1e-4, "Clip ratios to 1 plus or minus this value.", gt=0)
    use_grad_balancing: bool = learning(True, "Use the temporal gradient equalizer.")
    sde_window: str = learning(
        "", "SDE window: fixed:START:LENGTH, random:LENGTH or sliding:LENGTH[:STRIDE]."
    )
    kl_velocity: Literal["log_ratio", "gaussian"] = learning(
        "log_ratio", "Velocity KL: the mean log-ratio, or the closed form for two Gaussians."
    )


class NFTSettings(RewardGradientSettings, TrustRegionSettings):
    """DiffusionNFT, a velocity loss on re-noised rollouts."""

    name = "nft"
    label = "DiffusionNFT"
    class_path = "hyvideo.training.objectives.nft:NFT"
    trains = "levels"
    needs_old_velocities = True

    nft_levels: int = learning(4, "Noise levels that are trained per rollout.", ge=1)


class DraftSettings(RewardGradientSettings, TrustRegionSettings):
    """Reward gradients alone."""

    name = "draft"
    label = "reward gradients"
    class_path = "hyvideo.training.objectives.draft:Draft"
    trains = "levels"

    reward_gradient_weight: float = learning(
        0.05, "Weight of the reward's gradient through scorer and VAE.", gt=0
    )
    nft_levels: int = learning(
        4, "Noise levels at which the KL is measured; 0: at the reward step.", ge=0
    )
    kl_strategy: Literal["none", "fixed", "moving"] = learning(
        "moving", "KL terms: to the base model (fixed), or a moving anchor."
    )


class GivenVideosSettings(KLCoefficientSettings):
    """Training on videos of files, without rollouts."""

    kl_strategy: Literal["none", "fixed"] = learning("none", "KL terms: to the base model (fixed).")
    kl_weight: float = learning(1.0, "Largest coefficient of the KL term.", ge=0)
    kl_schedule: Literal["constant", "two_stage", "adaptive"] = learning(
        "constant", "KL coefficient schedule."
    )


class DPOSettings(GivenVideosSettings):
    """Preferences in CSV files, without rollouts."""

    name = "dpo"
    label = "DPO"
    class_path = "hyvideo.training.objectives.dpo:DPO"
    trains = "levels"
    videos_from = "pairs_csv"
    group_size = 2  # a winner and a loser

    pairs_csv: list[str] = learning(
        [],
        "Rated pairs of videos, folders of scripts.rate or tables: `prompt`, `first`, `second`, "
        "`answer`, optionally `dimension`, `ref_image_path`, or public forms.",
        is_path=True,
    )
    pair_weights: dict[str, float] = learning(
        {}, "Weights of the dimensions of pairs_csv, as JSON; default: all equally."
    )
    dpo_beta: float = learning(
        100.0, "Strength of a preference: larger values stay closer to the base model.", gt=0
    )
    nft_levels: int = learning(4, "Noise levels that are trained per pair.", ge=1)
    kl_strategy: Literal["fixed"] = learning("fixed", "KL to the base model, which is needed.")
    kl_weight: float = learning(1.0, "Largest coefficient of the KL term.", gt=0)

    @field_validator("pairs_csv")
    @classmethod
    def _are_files(cls, paths: list[str]) -> list[str]:
        return [file_in_study(path, PAIRS_FILE, "pairs_csv") for path in paths]

    def read_videos(self, seed: int) -> Examples:
        ratings = [rating for path in self.pairs_csv for rating in read_ratings(path)]
        source = ", ".join(self.pairs_csv)
        found = select_preferences(ratings, self.pair_weights, source)
        return split_by_prompt(found, seed)


class SFTSettings(GivenVideosSettings):
    """Supervised fine-tuning on videos in CSV files, without rollouts."""

    name = "sft"
    label = "fine-tuning"
    class_path = "hyvideo.training.objectives.sft:SFT"
    trains = "levels"
    videos_from = "videos_csv"
    needs_rewards = False
    group_size = 1

    videos_csv: list[str] = learning(
        [],
        "Videos to train on, folders of videos with captions or of scripts.rate, or tables: "
        "`prompt`, `video`, optionally `ref_image_path`, `keep` (1 or 0), `score`.",
        is_path=True,
    )
    keep_fraction: float = learning(
        1.0,
        "Share of each prompt's videos that is trained on, those with the highest `score`.",
        gt=0,
        le=1,
    )
    nft_levels: int = learning(1, "Noise levels that are trained per video.", ge=1)

    def read_videos(self, seed: int) -> Examples:
        return Examples(read_examples(self.videos_csv, self.keep_fraction))


class DistillSettings(TrainedStepsSettings):
    """A student of few steps, which follows its guided teacher."""

    name = "distill"
    label = "Step distillation"
    class_path = "hyvideo.training.objectives.distill:Distill"
    trains = "path"
    needs_rewards = False

    kl_strategy: Literal["fixed"] = learning("fixed", "The teacher is the anchor.")
    anchor_substeps: int = learning(
        1, "Steps that the teacher takes for each step of a rollout.", ge=1, le=MAX_STEPS
    )

    @property
    def strategy(self) -> str:
        return self.kl_strategy


_ALL = (GRPOSettings, NFTSettings, DraftSettings, DPOSettings, SFTSettings, DistillSettings)
BUILT_IN = {each.name: each for each in _ALL}
# Attributes that the class of a custom objective has as well.
_TRAITS = ("trains", "has_ratio", "needs_old_velocities", "needs_rewards")
# The settings of a custom objective that inherits from no built-in one, by what it trains.
_LIKE = {"steps": GRPOSettings, "levels": NFTSettings, "path": DistillSettings}


def label_of(name: str) -> str:
    """Return the name of an objective in reports, also of one whose file has moved."""
    return BUILT_IN[name].label if name in BUILT_IN else name.rpartition(":")[2]


def settings_class(name: str) -> type[ObjectiveSettings]:
    """Return the settings of an objective, built-in or ``FILE.py:NAME``.

    Raises ValueError as `objective_class` does.
    """
    return BUILT_IN[name] if name in BUILT_IN else _custom_settings(name)


def objective_class(name: str) -> type:
    """Return the class of an objective, built-in or in a file that is imported once.

    Raises ValueError if invalid.
    """
    if name in BUILT_IN:
        return pkgutil.resolve_name(BUILT_IN[name].class_path)
    if ":" not in name:
        raise ValueError(
            f"objective must be one of {', '.join(BUILT_IN)} or FILE.py:NAME, got {quote(name, 80)}; "
            f"{nearest(name, BUILT_IN) or 'correct the name'}"
        )
    found = load_object(name, "objective")
    if getattr(found, "trains", None) not in _LIKE:
        raise ValueError(
            f"objective {name} must name a class that inherits from StepObjective or LevelObjective "
            f"of hyvideo.training.objective, got {found!r:.80}"
        )
    reserved = [each for each in found.metrics if each.partition("/")[0] in RESERVED_GROUPS]
    if reserved:
        raise ValueError(
            f"objective {name} cannot report {', '.join(reserved)}, which the run itself reports; "
            "rename it"
        )
    return found


@cache
def _custom_settings(name: str) -> type[ObjectiveSettings]:
    """Return the settings of a custom objective: those of the built-in one that it inherits from or
    that trains the same, and those in ``Settings`` of its class, a `Section`.
    """
    cls = objective_class(name)
    paths = {each.class_path: each for each in _ALL}
    bases = (f"{base.__module__}:{base.__name__}" for base in cls.__mro__)
    inherited = next((paths[base] for base in bases if base in paths), None)
    like = inherited or _LIKE[cls.trains]
    defaults = inherited or ObjectiveSettings
    own = getattr(cls, "Settings", None)
    settings = create_model(cls.__name__, __base__=(own, like) if own else like)
    settings.name = name
    settings.label = label_of(name)
    for trait in _TRAITS:
        setattr(settings, trait, getattr(cls, trait, getattr(defaults, trait, None)))
    return settings
