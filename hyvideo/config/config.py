"""Settings of a run as one object, by section, and the values derived from them."""

import dataclasses
import json
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from hyvideo.config import all_settings
from hyvideo.config.declaration import Switch, Traits
from hyvideo.config.objectives import OBJECTIVES, traits_of
from hyvideo.data.files import find_path
from hyvideo.data.prompts import Request
from hyvideo.grpo.trust_region import KLWeights
from hyvideo.models.versions import version_defaults
from hyvideo.rewards.rewards import short_names
from hyvideo.schedulers.noise_matching import matched_eta
from hyvideo.schedulers.transitions import SAMPLERS, parse_sigmas

RESUME_WORDS = ("auto", "latest")  # values of resume_from_checkpoint that are no folders
# Settings A and B of the paper (arXiv:2603.21872, Table 2).
REWARD_PRESETS = {
    "averaged": {"VQ": 1.0, "MQ": 1.0, "TA": 1.0},
    "alignment": {"VQ": 0.5, "MQ": 0.5, "TA": 1.0},
}
REWARD_PRESETS["A"] = REWARD_PRESETS["averaged"]
REWARD_PRESETS["B"] = REWARD_PRESETS["alignment"]


@dataclass(frozen=True)
class Config:
    """Settings of a run, by section."""

    model: all_settings.ModelSettings = all_settings.ModelSettings()
    data: all_settings.DataSettings = dataclasses.field(default_factory=all_settings.DataSettings)
    rollout: all_settings.RolloutSettings = all_settings.RolloutSettings()
    reward: all_settings.RewardSettings = dataclasses.field(
        default_factory=all_settings.RewardSettings
    )
    loss: all_settings.LossSettings = all_settings.LossSettings()
    trust_region: all_settings.TrustRegionSettings = all_settings.TrustRegionSettings()
    optimizer: all_settings.OptimizerSettings = all_settings.OptimizerSettings()
    distributed: all_settings.DistributedSettings = all_settings.DistributedSettings()
    record: all_settings.RecordSettings = dataclasses.field(
        default_factory=all_settings.RecordSettings
    )

    @classmethod
    def of_version(cls, version: str) -> "Config":
        """Return the resolved settings of a run that sets only ``transformer_version``."""
        return cls().with_settings(transformer_version=version).resolved()

    def flat(self) -> dict:
        """Return all settings in one dict, by flag name."""
        values = {
            name: value for section in vars(self).values() for name, value in vars(section).items()
        }
        return {
            name: list(value) if isinstance(value, list) else value
            for name, value in values.items()
        }

    def with_settings(self, **changes) -> "Config":
        """Return a copy with the given settings changed."""
        by_section: dict[str, dict] = {}
        for name, value in changes.items():
            by_section.setdefault(_OWNERS[name], {})[name] = in_form(name, value)
        sections = {
            name: dataclasses.replace(getattr(self, name), **values)
            for name, values in by_section.items()
        }
        return dataclasses.replace(self, **sections)

    @property
    def defaults_of_version(self) -> dict[str, object]:
        """Settings of the model version, by name, that replace those that are None."""
        version = version_defaults(self.model.transformer_version)
        defaults = {
            "vae_dtype": version.vae_dtype,
            "negative_prompt": version.negative_prompt,
            "fps": version.fps,
            "shift": version.shift,
            "cfg_scale": version.guidance_scale,
        }
        sigmas = self.rollout.sigmas
        if sigmas is None and self.rollout.shift is None and version.sigmas:
            sigmas = version.sigmas
            defaults["sigmas"] = sigmas
        defaults["validation_steps"] = len(parse_sigmas(sigmas)) or version.num_steps
        if self.loss.objective == "distill":  # a student is validated at its own steps
            defaults["validation_steps"] = self.rollout.grpo_sampling_steps
        defaults["validation_eta"] = 1.0 if version.native == "renoise" else 0.0
        given = self.flat()
        return {name: value for name, value in defaults.items() if given[name] is None}

    def resolved(self) -> "Config":
        """Return a copy with the version's defaults, the matched eta, and kl_strategy none if
        kl_weight is 0.

        If no eta matches, `rules` reports it.

        Training, generation and planning all resolve here, so a setting that is None has the same
        value in each.
        """
        config = self.with_settings(**self.defaults_of_version)
        if config.trust_region.kl_weight == 0:
            config = config.with_settings(kl_strategy="none")
        try:
            return (
                config.with_settings(eta=eta_of(config.rollout))
                if config.rollout.match_noise
                else config
            )
        except ValueError:
            return config

    def resolve_auto(self, *, on_gpu: bool, recompute: str = "full") -> "Config":
        """Return a copy with ``auto`` replaced for the device, and by ``recompute`` in
        activation_checkpointing.
        """
        chosen = {
            "batched_forward": not on_gpu,
            "enable_compile": on_gpu,
            "activation_checkpointing": recompute,
        }
        given = self.flat()
        return self.with_settings(
            **{name: value for name, value in chosen.items() if given[name] == "auto"}
        )

    @property
    def is_batched(self) -> bool:
        """True if samples and guidance branches share a forward pass; ``auto``: on a CPU."""
        batched = self.rollout.batched_forward
        return batched == "true" or (batched == "auto" and self.model.device == "cpu")

    @property
    def rows_per_pass(self) -> int:
        """Rollouts per training forward pass: 1 without batching, so that sharded ranks make the
        same calls.
        """
        return self.loss.mini_batch_size_per_update if self.is_batched else 1

    @property
    def rollout_size(self) -> tuple[int, int, int]:
        """Frames, height and width of a rollout."""
        return self.data.sample_n_frames, self.data.height, self.data.width

    @property
    def validation_size(self) -> tuple[int, int, int]:
        """Frames, height and width of a validation video; unset values are as in a rollout."""
        given = (
            self.record.validation_num_frames,
            self.record.validation_height,
            self.record.validation_width,
        )
        frames, height, width = (
            value or default for value, default in zip(given, self.rollout_size)
        )
        return frames, height, width

    @property
    def video_sizes(self) -> dict[str, tuple[int, int, int]]:
        """Frames, height and width of the videos of a run, by kind of video."""
        validation = (
            {"a validation video": self.validation_size} if self.data.valid_video_csv else {}
        )
        return {"a rollout": self.rollout_size} | validation

    @property
    def validation_shift(self) -> float:
        """Shift of the validation schedule; by default as in the rollouts."""
        shift = self.record.validation_shift
        return self.rollout.shift if shift is None else shift

    @property
    def validation_sigmas(self) -> str | None:
        """Noise levels of the validation schedule: those of the rollouts, or None, which leaves
        them to the shift.

        None with another number of steps than the rollouts, and with a separate shift in
        validation.
        """
        is_shifted = self.record.validation_shift is not None
        has_as_many = len(parse_sigmas(self.rollout.sigmas)) == self.record.validation_steps
        return self.rollout.sigmas if has_as_many and not is_shifted else None

    @property
    def validation_eta(self) -> float:
        """Noise scale of the validation; 0 for the ODE."""
        return self.record.validation_eta or 0.0

    @property
    def validation_sampler(self) -> str:
        """Sampler of a validation with noise: that of the rollouts or, for a version that samples
        with noise, its own.
        """
        version = version_defaults(self.model.transformer_version)
        return "cps" if version.native == "renoise" else self.rollout.sde_type

    @property
    def validation_noise(self) -> str:
        """Sampler and noise scale of the validation, such as ``cps:1``; empty for the ODE."""
        eta = self.validation_eta
        return f"{self.validation_sampler}:{eta:g}" if eta > 0 else ""

    @property
    def validation_cfg_scale(self) -> float:
        """Guidance scale of the validation; by default as in the rollouts."""
        scale = self.record.validation_cfg_scale
        return self.rollout.cfg_scale if scale is None else scale

    def sampled_as_validation(self) -> "Config":
        """Return a copy whose rollouts have the frames, size, noise levels, guidance and noise of
        the validation.

        Without noise in validation, the sampler is as in the rollouts.
        """
        frames, height, width = self.validation_size
        config = self
        if self.validation_eta > 0:
            config = self.with_settings(
                sde_type=self.validation_sampler,
                eta=self.validation_eta,
                match_noise="",
                last_step="deterministic",
                sde_window="",
            )
        return config.with_settings(
            sample_n_frames=frames,
            height=height,
            width=width,
            shift=self.validation_shift,
            sigmas=self.validation_sigmas,
            cfg_scale=self.validation_cfg_scale,
            validation_cfg_scale=None,
        )

    def with_absolute_paths(self) -> "Config":
        """Return a copy whose paths do not depend on the working directory, which code of a scorer
        may change.
        """
        changes: dict[str, object] = {}
        for name, value in self.flat().items():
            if TRAITS[name].is_path:
                changes[name] = (
                    list(map(absolute, value)) if isinstance(value, list) else absolute(value)
                )
        if os.path.isdir(self.model.family):  # else a module
            changes["family"] = os.path.abspath(self.model.family)
        return self.with_settings(**changes)

    @property
    def uses_pairs(self) -> bool:
        """True if the run trains on rated pairs of videos instead of rollouts."""
        try:
            return traits_of(self.loss.objective).uses_pairs
        except ValueError:  # `rules` reports an invalid objective
            return False

    @property
    def scores_rollouts(self) -> bool:
        """True if the videos of the rollouts are decoded and scored."""
        try:
            traits = traits_of(self.loss.objective)
        except ValueError:  # `rules` reports an invalid objective
            return True
        return traits.needs_rewards and not traits.uses_pairs

    def as_pilot(self) -> "Config":
        """Return a copy for a pilot: two iterations without validation, in the folder
        ``<output_dir>-pilot``.
        """
        folder = f"{self.record.output_dir.rstrip('/')}-pilot"
        return self.with_settings(
            max_steps=2,
            output_dir=folder,
            resume_from_checkpoint="",
            valid_video_csv=[],
            on_reward_hacking="warn",
        )

    @property
    def kl_strategy(self) -> str:
        """KL strategy; ``none`` also if the coefficient is always 0."""
        return "none" if self.trust_region.kl_weight == 0 else self.trust_region.kl_strategy

    @property
    def kl_weights(self) -> KLWeights:
        """Weights of the two KL terms, by the strategy."""
        settings, name = self.trust_region, self.kl_strategy
        if name.startswith("dual"):
            return KLWeights(settings.dual_kl_moving_weight, settings.dual_kl_step_weight)
        return KLWeights(float(name in ("fixed", "moving")), float(name == "stepwise"))

    @property
    def needs_anchor(self) -> bool:
        """True if the strategy has a KL to the anchor."""
        return self.kl_weights.position != 0

    @property
    def anchor_moves(self) -> bool:
        """True if there is an anchor that is refreshed."""
        return self.needs_anchor and self.kl_strategy.endswith("moving")

    @property
    def anchor_cfg_scale(self) -> float:
        """Guidance scale of the anchor; by default as for the policy."""
        scale = self.trust_region.anchor_cfg_scale
        return self.rollout.cfg_scale if scale is None or not self.needs_anchor else scale

    @property
    def anchor_has_own_guidance(self) -> bool:
        """True if the anchor differs from the policy even if their weights are equal."""
        return max(1.0, self.anchor_cfg_scale) != max(1.0, self.rollout.cfg_scale)

    @property
    def measures_velocity(self) -> bool:
        """True if the strategy has a KL to the rollout policy."""
        return self.kl_strategy == "stepwise" or self.kl_strategy.startswith("dual")

    @property
    def kl_warmup(self) -> float:
        """Updates of the KL warm-up.

        The public reference counts (rollout, step) pairs of a replica instead.
        """
        rollout = self.rollout
        loss = self.loss
        pairs = 1.0
        if rollout.reference_conventions and loss.objective == "grpo":
            pairs = (
                rollout.grpo_sampling_steps * loss.timestep_fraction / loss.num_updates_per_rollout
            )
            pairs *= rollout.batch_size * rollout.gradient_accumulation_steps
        return self.trust_region.kl_warmup_updates / pairs

    @property
    def num_branches(self) -> int:
        """Forward passes per velocity in training: 2 with guidance (at most), 1 without."""
        return 2 if self.rollout.cfg_scale > 1 else 1

    @property
    def negative_requests(self) -> list[Request]:
        """Request of the negative branch of guidance; empty without guidance."""
        is_guided = (
            max(self.rollout.cfg_scale, self.validation_cfg_scale, self.anchor_cfg_scale) > 1
        )
        return [Request(self.data.negative_prompt, is_negative=True)] if is_guided else []

    @property
    def num_updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.optimizer.max_steps * self.loss.num_updates_per_rollout

    @property
    def given_reward_weights(self) -> dict[str, float | dict[str, float]]:
        """Weights by dimension, or by scorer and dimension."""
        text = self.reward.reward_weights
        return REWARD_PRESETS[text] if text in REWARD_PRESETS else json.loads(text)

    @property
    def given_pair_weights(self) -> dict[str, float]:
        """Weights of the dimensions of rated pairs; empty if all dimensions count equally."""
        return json.loads(self.data.pair_weights) if self.data.pair_weights else {}

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weights by dimension, for plans and reports; see `flat_weights`."""
        return flat_weights(self.given_reward_weights)


SECTIONS = {field.name: field.type for field in dataclasses.fields(Config)}
FIELDS = {
    field.name: field for section in SECTIONS.values() for field in dataclasses.fields(section)
}
TRAITS: dict[str, Traits] = {name: field.metadata["traits"] for name, field in FIELDS.items()}
_OWNERS = {
    field.name: section for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)
}


def value_type(name: str) -> Any:
    """Return the type of a setting's values other than None, which stands for a default that other
    settings decide.
    """
    declared = FIELDS[name].type
    members = get_args(declared)
    if type(None) not in members:
        return declared
    return next(member for member in members if member is not type(None))


def in_form(name: str, value: object) -> object:
    """Return a value in the form of its setting: a word becomes a list if needed, a bool of a
    switch becomes text.
    """
    if value_type(name) is Switch and isinstance(value, bool):
        return str(value).lower()
    if get_origin(value_type(name)) is not list:
        return value
    return [word for word in ([value] if isinstance(value, str) else value) if word]


def absolute(path: str) -> str:
    """Return the absolute path of a setting, also in ``FILE.py:NAME``; other names, JSON and ``""``
    are unchanged.
    """
    file, separator, name = path.rpartition(":")
    if file.endswith(".py"):
        return f"{os.path.abspath(file)}{separator}{name}"
    if path in ("", *RESUME_WORDS, *SAMPLERS, *OBJECTIVES) or is_json(path):
        return path
    return os.path.abspath(path if os.path.exists(path) else find_path(path))


def is_json(text: str) -> bool:
    """Return whether ``reward_weights`` or ``reward_config`` is a JSON object instead of a name or
    path.
    """
    return text.lstrip().startswith("{")


def eta_of(rollout: all_settings.RolloutSettings) -> float:
    """Return the eta that ``match_noise`` requires. Raises ValueError if there is none."""
    return matched_eta(
        rollout.match_noise,
        rollout.sde_type,
        num_steps=rollout.grpo_sampling_steps,
        shift=rollout.shift,
        last_step=rollout.last_step,
        sde_window=rollout.sde_window,
        sigmas=rollout.sigmas,
    )


def flat_weights(weights: dict) -> dict:
    """Return weights by dimension; scorers are flattened:
    ``{"videoalign": {"VQ": 0.5}, "CLIPScore": 1}``.

    A dimension that two scorers have is named SCORER/DIMENSION.
    """
    by_scorer = [
        value if isinstance(value, dict) else {name: value} for name, value in weights.items()
    ]
    counts = Counter(dimension for dimensions in by_scorer for dimension in dimensions)
    short = short_names([name for name, value in weights.items() if isinstance(value, dict)])
    return {
        f"{short[scorer]}/{dimension}"
        if counts[dimension] > 1 and scorer in short
        else dimension: weight
        for scorer, dimensions in zip(weights, by_scorer)
        for dimension, weight in dimensions.items()
    }
