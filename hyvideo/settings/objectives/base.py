"""What the settings of the objectives share: facts of a class, KL terms, trained steps, reward
gradients and given videos. Imports no torch.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from hyvideo.data.examples import Examples
from hyvideo.loss.trust_region import KLWeights
from hyvideo.settings.problems import Problems
from hyvideo.settings.sections import RolloutSettings, Section, learning, machine


class ObjectiveSettings(Section):
    """What all objectives have."""

    name: ClassVar[str]  # value of the setting ``objective``
    label: ClassVar[str]  # in reports
    sentence: ClassVar[str]  # what it is, in the help of the setting ``objective``
    class_path: ClassVar[str] = ""  # module:class of the implementation
    trains: ClassVar[Literal["steps", "path", "levels"]]  # stochastic steps, an ODE path, levels
    has_ratio: ClassVar[bool] = False  # the loss has likelihood ratios
    needs_velocities: ClassVar[bool] = False  # mean velocities of a flow map are not enough
    # its check refuses velocities of random weights
    checks_velocities: ClassVar[bool] = False
    validates_own_steps: ClassVar[bool] = False  # by default, with the steps of the rollouts
    needs_old_velocities: ClassVar[bool] = False  # later updates need those of the rollout policy
    # setting that names the CSV files of the videos that it trains on; empty: rollouts
    videos_from: ClassVar[str] = ""
    needs_rewards: ClassVar[bool] = True  # rollouts are decoded and scored
    group_size: ClassVar[int] = 0  # num_generations, if the objective decides it
    example: ClassVar[str] = "video"  # what one of the given videos is called in texts

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

    def problems(
        self, rollout: RolloutSettings, *, guidance: Mapping[str, float], rows_per_pass: int
    ) -> Problems:
        """Yield what the objective cannot be used with, besides the rules of all objectives.

        ``guidance``: scale of the trained transformer, by the setting that decides it.
        """
        yield from ()

    def derived(self) -> dict[str, object]:
        """Return settings that follow from others, by name."""
        return {}

    def batches_of_warmup(self, rollout: RolloutSettings) -> float:
        """Return the number of updates of the KL warm-up that count as one."""
        return 1.0

    @property
    def method(self) -> str:
        """What the objective trains on, in words; empty for rollouts."""
        return ""

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

    def derived(self) -> dict[str, object]:
        return {"kl_strategy": "none"} if self.kl_weight == 0 else {}


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


class GivenVideosSettings(KLCoefficientSettings):
    """Training on videos of files, without rollouts."""

    kl_strategy: Literal["none", "fixed"] = learning("none", "KL terms: to the base model (fixed).")
    kl_weight: float = learning(1.0, "Largest coefficient of the KL term.", ge=0)
    kl_schedule: Literal["constant", "two_stage", "adaptive"] = learning(
        "constant", "KL coefficient schedule."
    )

    def problems(
        self, rollout: RolloutSettings, *, guidance: Mapping[str, float], rows_per_pass: int
    ) -> Problems:
        """Yield guidance with which given videos cannot be trained on."""
        scales = {**guidance, "anchor_cfg_scale": self.anchor_cfg_scale or 1}
        for setting, scale in scales.items():
            if scale > 1:
                yield (
                    f"objective {self.name} trains the model without guidance, got {setting} "
                    f"{scale:g}; set {setting} 1, and validation_cfg_scale to the guidance of your "
                    "videos"
                )
