"""Settings of a run as one object, by section, and the values derived from them.

For people the names are flat: a flag or a YAML key is the name of a leaf, looked up in the chosen
objective first.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from hyvideo.checkpoints.format import lora_of_run, newest_of_run
from hyvideo.data.prompts import Request
from hyvideo.files.files import CACHED_REPOSITORY, find_path, is_repository
from hyvideo.files.text import nearest, quote
from hyvideo.models.guidance import Expert, Guidance, expert_at, levels_of
from hyvideo.models.placement import Placements
from hyvideo.models.versions import RELEASED, Version, version_defaults
from hyvideo.schedulers.noise_matching import matched_eta
from hyvideo.schedulers.transitions import SAMPLERS, parse_sigmas
from hyvideo.settings import sections
from hyvideo.settings.objectives import BUILT_IN, DEFAULT, ObjectiveSettings, settings_class
from hyvideo.settings.reward_entries import without_entries
from hyvideo.settings.reward_settings import is_json, resolved_weights
from hyvideo.settings.sampling import ODE, Sampling
from hyvideo.settings.sections import Leaf, leaf_of, leaves_of

OBJECTIVE = "objective"  # the setting that chooses the objective, and the section of its settings
# Settings that name what a run has saved, and how it is found in the folder of the run.
SAVED = {
    "anchor_path": newest_of_run,
    "pretrained_lora_path": lora_of_run,
    "base_lora_path": lora_of_run,
    "low_noise_base_lora_path": lora_of_run,
}
RESUME_WORDS = ("auto", "latest")  # values of resume_from_checkpoint that are no folders


class Config(BaseModel):
    """Settings of a run, by section."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: sections.ModelSettings = sections.ModelSettings()
    data: sections.DataSettings = sections.DataSettings()
    rollout: sections.RolloutSettings = sections.RolloutSettings()
    reward: sections.RewardSettings = sections.RewardSettings()
    objective: ObjectiveSettings = BUILT_IN[DEFAULT]()
    optimizer: sections.OptimizerSettings = sections.OptimizerSettings()
    distributed: sections.DistributedSettings = sections.DistributedSettings()
    validation: sections.ValidationSettings = sections.ValidationSettings()
    record: sections.RecordSettings = sections.RecordSettings()

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> "Config":
        """Return the settings with these values, by flat name; the others have their default.

        Raises ValueError with all problems.
        """
        values = without_entries(values)
        objective = values.pop(OBJECTIVE, DEFAULT)
        classes = SECTIONS | {OBJECTIVE: settings_class(str(objective))}
        if classes[OBJECTIVE].group_size:
            values.setdefault("num_generations", classes[OBJECTIVE].group_size)
        parts, problems = read_sections(classes, values)
        known = {name for section in classes.values() for name in section.model_fields}
        problems += [
            _unknown(name, values[name], objective) for name in values if name not in known
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return cls(**parts)

    @property
    def defaults(self) -> dict[str, Any]:
        """The values of all settings of the run if only its version and objective are given."""
        values = type(self).of_version(self.model.transformer_version).flat()
        own = leaves_of(type(self.objective))
        known = {name: values[name] for name in self.flat() if name not in own}
        if self.objective.group_size:
            known["num_generations"] = self.objective.group_size
        return (
            known
            | {name: leaf.default for name, leaf in own.items()}
            | {OBJECTIVE: self.objective.name}
        )

    @classmethod
    def of_version(cls, version: str) -> "Config":
        """Return the resolved settings of a run that sets only ``transformer_version``."""
        return cls().with_settings(transformer_version=version).resolved()

    def flat(self) -> dict[str, Any]:
        """Return all settings of the run in one dict, by flat name."""
        values: dict[str, Any] = {}
        for section in type(self).model_fields:
            if section == OBJECTIVE:
                values[OBJECTIVE] = self.objective.name
            values |= dict(getattr(self, section))
        return {
            name: list(value) if isinstance(value, list) else value
            for name, value in values.items()
        }

    def leaves(self) -> dict[str, Leaf]:
        """Return the declarations of all settings of the run, by flat name."""
        return LEAVES | leaves_of(type(self.objective))

    def with_settings(self, **changes: Any) -> "Config":
        """Return a copy with the given settings changed.

        With another objective, the settings that it does not have are dropped.
        """
        changes = {OBJECTIVE: self.objective.name} | changes
        return self.from_flat(in_objective(self.flat(), changes[OBJECTIVE]) | changes)

    # --- values that follow from the settings ---

    @property
    def version(self) -> Version:
        """What is known of the version of the model."""
        return version_defaults(self.model.transformer_version)

    @property
    def trained_expert(self) -> Expert | None:
        """The trained expert; None for a model of a single transformer."""
        return self.model.trained_expert

    @property
    def placements(self) -> Placements:
        """Where the models of the training are."""
        return Placements.of_run(self.model.offload)

    @property
    def trained_levels(self) -> tuple[float, float]:
        """Lowest and highest noise level that the trained transformer predicts."""
        return levels_of(self.trained_expert, self.version.boundary)

    def trains(self, level: float) -> bool:
        """Return whether the trained transformer predicts at a noise level."""
        boundary = self.version.boundary
        return boundary is None or expert_at(level, boundary) == self.model.expert

    @property
    def defaults_of_version(self) -> dict[str, object]:
        """Settings of the model version, by name, that replace those that are None."""
        version = self.version
        defaults = {
            "vae_dtype": version.vae_dtype,
            "negative_prompt": version.negative_prompt,
            "fps": version.fps,
            "shift": version.shift,
            "cfg_scale": version.guidance_scale,
        }
        if version.boundary is not None:
            defaults["low_noise_cfg_scale"] = version.low_noise_guidance_scale
        sigmas = self.rollout.sigmas
        if sigmas is None and self.rollout.shift is None and version.sigmas:
            sigmas = version.sigmas
            defaults["sigmas"] = sigmas
        defaults["validation_steps"] = len(parse_sigmas(sigmas)) or version.num_steps
        if self.objective.validates_own_steps:
            defaults["validation_steps"] = self.rollout.grpo_sampling_steps
        defaults["validation_eta"] = 1.0 if version.native == "renoise" else 0.0
        given = self.flat()
        return {name: value for name, value in defaults.items() if given[name] is None}

    def resolved(self) -> "Config":
        """Return a copy with the version's defaults, kl_strategy none if kl_weight is 0, and weights of
        the dimensions of custom scorers.

        If a scorer cannot be imported, `checks.rules` reports it.

        Training, generation and planning all resolve here, so a setting that is None has the same
        value in each.
        """
        config = self.with_settings(**self.defaults_of_version)
        config = config._with_cached_weights()._with_checkpoints_of_runs()
        config = config.with_settings(**config.objective.derived())
        with suppress(ValueError):
            config = config.with_settings(reward_weights=resolved_weights(config.reward))
        return config

    def _with_cached_weights(self) -> "Config":
        """Return the settings with the project's own folder of assets, or that of a repository in
        the hub's cache; the sizes of a version that is not listed are in its files, so these are
        downloaded.
        """
        root = self.model.pretrained_model_root
        found = find_path(root)
        if found != Path(root):
            return self.with_settings(pretrained_model_root=str(found))
        if not is_repository(root) and not Path(root).name.startswith(CACHED_REPOSITORY):
            return self
        from hyvideo.weights.hub import local_folder  # slow to import

        is_listed = self.model.transformer_version in RELEASED
        return self.with_settings(pretrained_model_root=local_folder(root, only_cached=is_listed))

    def _with_checkpoints_of_runs(self) -> "Config":
        """Return the settings with the newest checkpoint where the folder of a run is named."""
        changes: dict[str, object] = {}
        for name, value in self.flat().items():
            find = SAVED.get(name)
            if find and value:
                changes[name] = str(find(Path(str(value))))
        return self.with_settings(**changes)

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
    def eta(self) -> float:
        """Noise scale of a rollout. Raises ValueError if the sampler cannot have the noise of the one
        that the setting ``eta`` names.
        """
        rollout = self.rollout
        if not isinstance(rollout.eta, str):
            return rollout.eta
        return matched_eta(
            rollout.eta,
            rollout.sde_type,
            num_steps=rollout.grpo_sampling_steps,
            shift=rollout.shift,
            last_step=rollout.last_step,
            sde_window=self.objective.window,
            sigmas=rollout.sigmas,
        )

    @property
    def sampling(self) -> Sampling:
        """How a rollout is sampled. Raises ValueError as `eta` does."""
        rollout = self.rollout
        return replace(
            self.ode_sampling,
            sampler=rollout.sde_type,
            eta=self.eta,
            last_step=rollout.last_step,
            reference_conventions=rollout.reference_conventions,
        )

    @property
    def ode_sampling(self) -> Sampling:
        """How a rollout is sampled, without its noise."""
        data = self.data
        rollout = self.rollout
        return Sampling(
            frames=data.sample_n_frames,
            height=data.height,
            width=data.width,
            fps=data.fps,
            steps=rollout.grpo_sampling_steps,
            shift=rollout.shift,
            sigmas=rollout.sigmas,
            guidance_scale=rollout.cfg_scale,
            low_noise_guidance_scale=1.0
            if rollout.low_noise_cfg_scale is None
            else rollout.low_noise_cfg_scale,
            boundary=self.version.boundary,
            guidance_interval=rollout.guidance_interval,
            negative_prompt=data.negative_prompt,
            last_step="deterministic",
        )

    @property
    def validation_sampling(self) -> Sampling:
        """How a validation video is sampled: as a rollout where validation sets nothing else, with
        the ODE unless ``validation_eta`` is above 0.
        """
        validation = self.validation
        rollout = self.ode_sampling
        given = {
            "frames": validation.validation_num_frames or None,
            "height": validation.validation_height or None,
            "width": validation.validation_width or None,
            "shift": validation.validation_shift,
            "guidance_scale": validation.validation_cfg_scale,
            "low_noise_guidance_scale": validation.validation_low_noise_cfg_scale,
        }
        # The levels of the rollouts, unless there are as many steps with a shift of their own.
        has_levels = (
            validation.validation_shift is None
            and len(parse_sigmas(rollout.sigmas)) == validation.validation_steps
        )
        sampler = ODE
        if validation.validation_eta:
            sampler = "cps" if self.version.native == "renoise" else self.rollout.sde_type
        return replace(
            rollout,
            **{name: value for name, value in given.items() if value is not None},
            steps=validation.validation_steps,
            sigmas=rollout.sigmas if has_levels else None,
            sampler=sampler,
            eta=validation.validation_eta or 0.0,
        )

    @property
    def video_sizes(self) -> dict[str, tuple[int, int, int]]:
        """Frames, height and width of the videos of a run, by kind of video."""
        sizes = {"a rollout": self.ode_sampling.size}
        if self.data.valid_video_csv:
            sizes["a validation video"] = self.validation_sampling.size
        return sizes

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
        return self.objective.mini_batch_size_per_update if self.is_batched else 1

    @property
    def policy_cfg_scale(self) -> float:
        """Guidance scale of the trained transformer in rollouts."""
        return self.ode_sampling.guidance.scale_of(self.trained_expert)

    @property
    def anchor_cfg_scale(self) -> float:
        """Guidance scale of the anchor; by default as for the policy."""
        scale = self.objective.anchor_cfg_scale
        if scale is None or not self.objective.needs_anchor:
            return self.policy_cfg_scale
        return scale

    @property
    def anchor_guidance(self) -> Guidance:
        """Guidance of the rollouts with the anchor in place of the policy."""
        return self.ode_sampling.guidance.with_scale(self.trained_expert, self.anchor_cfg_scale)

    @property
    def anchor_has_own_guidance(self) -> bool:
        """True if the anchor differs from the policy even if their weights are equal."""
        return max(1.0, self.anchor_cfg_scale) != max(1.0, self.policy_cfg_scale)

    @property
    def kl_warmup(self) -> float:
        """Updates of the KL warm-up."""
        batches = self.objective.batches_of_warmup(self.rollout)
        return self.objective.kl_warmup_updates / batches

    @property
    def num_branches(self) -> int:
        """Forward passes per velocity in training: 2 with guidance (at most), 1 without."""
        return 2 if self.ode_sampling.is_guided else 1

    @property
    def negative_requests(self) -> list[Request]:
        """Request of the negative branch of guidance; empty without guidance."""
        guidances = (
            self.ode_sampling.guidance,
            self.validation_sampling.guidance,
            self.anchor_guidance,
        )
        is_guided = max(guidance.largest for guidance in guidances) > 1
        return [Request(self.data.negative_prompt, is_negative=True)] if is_guided else []

    @property
    def num_updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.optimizer.max_steps * self.objective.updates

    def with_absolute_paths(self) -> "Config":
        """Return a copy whose paths do not depend on the working directory, which code of a scorer
        may change.
        """
        changes: dict[str, object] = {}
        leaves = self.leaves()
        for name, value in self.flat().items():
            if leaves[name].is_path and not (
                name == "pretrained_model_root" and is_repository(value)
            ):
                is_list = isinstance(value, list)
                changes[name] = list(map(absolute, value)) if is_list else absolute(value)
        if os.path.isdir(self.model.family):  # else a module
            changes["family"] = os.path.abspath(self.model.family)
        return self.with_settings(**changes)

    def as_pilot(self) -> "Config":
        """Return a copy for a pilot: two iterations without validation, in the folder
        ``<output_dir>-pilot``.
        """
        folder = f"{self.record.output_dir.rstrip('/')}-pilot"
        return self.with_settings(
            max_steps=2,
            output_dir=folder,
            resume_from_checkpoint="auto",
            valid_video_csv=[],
            on_reward_hacking="warn",
        )


SECTIONS: dict[str, type[sections.Section]] = {
    name: field.annotation for name, field in Config.model_fields.items() if name != OBJECTIVE
}


# --- leaves ---------------------------------------------------------------------------------------


_OBJECTIVES = ", ".join(f"{name} ({cls.sentence})" for name, cls in BUILT_IN.items())
_CHOICE: FieldInfo = sections.learning(
    DEFAULT,
    f"Loss: {_OBJECTIVES}, or FILE.py:NAME.",
    is_path=True,
    choices=BUILT_IN,
)
_CHOICE.annotation = str
# Settings of every run, and all settings; of a name that several objectives have, the first one.
SHARED = {name: leaf for cls in SECTIONS.values() for name, leaf in leaves_of(cls).items()}
LEAVES = SHARED | {OBJECTIVE: leaf_of(OBJECTIVE, _CHOICE)}
for _cls in BUILT_IN.values():
    LEAVES = leaves_of(_cls) | LEAVES


def in_objective(values: Mapping[str, Any], objective: str) -> dict[str, Any]:
    """Return the settings that a run with an objective has, except for the objective itself."""
    known = SHARED.keys() | settings_class(objective).model_fields.keys()
    return {name: value for name, value in values.items() if name in known}


def without_custom_objective(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run, with objective grpo in place of a custom one, whose file may
    have moved since.
    """
    if values.get(OBJECTIVE, DEFAULT) in BUILT_IN:
        return dict(values)
    return in_objective(values, DEFAULT)


def objectives_with(name: str) -> list[str]:
    """Return the built-in objectives that have a setting."""
    return [each for each, cls in BUILT_IN.items() if name in cls.model_fields]


def read_sections(
    classes: Mapping[str, type[sections.Section]], values: Mapping[str, Any]
) -> tuple[dict[str, sections.Section], list[str]]:
    """Return the valid sections, and what is wrong with the values of the others. Other values are
    left alone.
    """
    valid, problems = {}, []
    for section, cls in classes.items():
        given = {name: values[name] for name in cls.model_fields if name in values}
        try:
            valid[section] = cls.model_validate(given)
        except ValidationError as error:
            first = {each["loc"][0]: each for each in reversed(error.errors())}  # of each setting
            for each in reversed(first.values()):
                if each["type"] == "value_error":  # of a validator, which names the setting
                    problems.append(str(each["ctx"]["error"]))
                else:
                    name, message = each["loc"][0], each["msg"]
                    problems.append(f"{name}: {message}, got {quote(each['input'], 80)}")
    return valid, problems


# --- problems -------------------------------------------------------------------------------------


def _unknown(name: str, value: object, objective: str) -> str:
    owners = objectives_with(name)
    if owners:
        return (
            f"{name} is a setting of objective {' and '.join(owners)} and not of {objective}; "
            f"remove it, or set objective {owners[0]}"
        )
    hint = nearest(name, LEAVES) or "--help lists the settings"
    if name in SECTIONS and isinstance(value, dict):
        hint = "settings have no sections: write its lines without indentation"
    return f"unknown setting {quote(name, 80)}; {hint}"


def absolute(path: str) -> str:
    """Return the absolute path of a setting, also in ``FILE.py:NAME``; other names, JSON and ``""``
    are unchanged. A leading ``~`` is the home folder: shells leave it in ``--output_dir=~/run``.
    """
    path = os.path.expanduser(path)
    file, separator, name = path.rpartition(":")
    if file.endswith(".py"):
        return f"{os.path.abspath(file)}{separator}{name}"
    if path in ("", *RESUME_WORDS, *SAMPLERS, *BUILT_IN) or is_json(path):
        return path
    return os.path.abspath(path if os.path.exists(path) else find_path(path))
