"""A planned run on a number of GPUs: quantities derived from its settings."""

import math
import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace

from hyvideo.checks.layout import division_problems, head_problems
from hyvideo.data.prompts import PromptFiles
from hyvideo.files.files import find_path
from hyvideo.models.sizes import Sizes
from hyvideo.planning.flops import Flops, Parameters, count_flops, count_parameters
from hyvideo.planning.hardware import Hardware
from hyvideo.planning.scorers import scorer_bytes
from hyvideo.settings.config import Config
from hyvideo.settings.iteration_plan import Plan, make_plan
from hyvideo.settings.objectives import LIKE
from hyvideo.settings.sampling import Sampling
from hyvideo.settings.sections import ValidationSettings

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class PlannedRun:
    """Settings and a transformer on ``world_size`` GPUs; `memory.resolve_auto` replaces ``auto``
    checkpointing.
    """

    config: Config
    world_size: int
    architecture: Sizes
    text_tokens: int = 300  # of the longest prompt
    hardware: Hardware = Hardware()
    files: PromptFiles = field(default_factory=PromptFiles, compare=False)

    @cached_property
    def settings(self) -> SimpleNamespace:
        """Settings by flag name, without sections."""
        on_gpu = self.config.model.device != "cpu"
        return SimpleNamespace(**self.config.resolve_auto(on_gpu=on_gpu, recompute="auto").flat())

    @cached_property
    def parameters(self) -> Parameters:
        """Numbers of parameters, counted without weights."""
        targets = () if self.settings.pretrained_lora_path else self.settings.lora_target_modules
        return count_parameters(self.architecture, tuple(targets))

    @cached_property
    def forward(self) -> Flops:
        """FLOPs of a forward pass for one video and branch, counted without weights."""
        return count_flops(self.architecture, self.config.sampling.size, self.text_tokens)

    @property
    def image_tokens(self) -> int:
        return self.architecture.image_tokens(*self.config.sampling.size)

    @property
    def block_text_tokens(self) -> int:
        """Text tokens that pass through the blocks with the video's tokens."""
        has_text = self.architecture.text_width > 0
        return self.text_tokens if has_text and self.architecture.memory.text_in_blocks else 0

    @property
    def caches_modulation(self) -> bool:
        """Return whether frozen modulation layers are in CPU memory.

        They are assumed to be trained if a setting may select them for the LoRA.
        """
        settings = self.settings
        is_sharded = settings.enable_fsdp and self.world_size > 1
        has_own_targets = bool(settings.lora_target_modules or settings.pretrained_lora_path)
        is_frozen = settings.lora_rank > 0 and not has_own_targets
        return (
            is_frozen
            and not is_sharded
            and settings.device != "cpu"
            and self.architecture.memory.caches_modulation
        )

    @property
    def checkpointing(self) -> str:
        """Activation checkpointing: ``none``, ``selective`` (all but attention), ``full``, or
        ``auto``.
        """
        return self.settings.activation_checkpointing

    @property
    def num_shards(self) -> int:
        """Number of ranks that share one copy of the parameters."""
        return (
            max(1, self.world_size // self.settings.dp_replicate)
            if self.settings.enable_fsdp
            else 1
        )

    @property
    def master_bytes(self) -> int:
        return BYTES["fp32"]

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.settings.dtype]

    @property
    def reward_bytes(self) -> float:
        """Bytes of the scorers' weights while they are on the GPU; 0 if nothing is scored."""
        if self.config.objective.videos_from and not self.config.data.valid_video_csv:
            return 0.0
        return scorer_bytes(self.config.reward, self.config.reward.reward_model)

    @property
    def has_images(self) -> bool:
        """Return whether the version encodes reference images, also with the VAE."""
        return any(word in self.settings.transformer_version for word in ("i2v", "flf2v"))

    @cached_property
    def validation(self) -> "PlannedRun | None":
        """The validation as a run that samples its videos as rollouts; None without validation."""
        if not self.config.data.valid_video_csv:
            return None
        batch_size = self.config.validation.validation_batch_size
        return self.sampled_as(self.config.validation_sampling, batch_size=batch_size)

    def sampled_as(self, sampling: Sampling, *, batch_size: int) -> "PlannedRun":
        """Return a run that samples batches of videos in this way as its rollouts."""
        objective = self.config.objective.name
        if self.config.objective.videos_from:  # one with rollouts
            objective = LIKE[self.config.objective.trains].name
        # Sampling adds no noise, and a window of the rollouts' steps may not fit its steps.
        without_window = {"sde_window": ""} if self.config.objective.window else {}
        return self.with_settings(
            objective=objective,
            sample_n_frames=sampling.frames,
            height=sampling.height,
            width=sampling.width,
            grpo_sampling_steps=sampling.steps,
            shift=sampling.shift,
            sigmas=sampling.sigmas,
            eta=self.config.eta,
            cfg_scale=sampling.guidance_scale,
            low_noise_cfg_scale=sampling.low_noise_guidance_scale,
            validation_cfg_scale=None,
            validation_low_noise_cfg_scale=None,
            batch_size=batch_size,
            **without_window,
        )

    @property
    def num_validations(self) -> int:
        """Number of validations of the whole run; 0 without validation prompts."""
        if not self.config.data.valid_video_csv:
            return 0
        return num_validations(self.config.validation, self.settings.max_steps)

    @cached_property
    def num_prompts(self) -> int:
        """Prompts for training and validation, in the files that exist.

        Raises ValueError for an invalid file.
        """
        data = self.config.data
        objective = self.config.objective
        paths = dict.fromkeys([*data.prompts_csv, *data.valid_video_csv])
        given = 0
        if objective.videos_from:
            paths = dict.fromkeys(data.valid_video_csv)
            if all(os.path.exists(path) for path in getattr(objective, objective.videos_from)):
                given = len(objective.read_videos(data.seed).all_requests)
        found = (path for path in paths if os.path.exists(find_path(path)))
        return given + len(self.files.read(found))

    @cached_property
    def num_validated(self) -> int:
        """Prompts for validation. Raises ValueError for an invalid file."""
        return len(self.files.read(self.config.data.valid_video_csv))

    @property
    def rollouts_per_replica(self) -> int:
        return self.settings.batch_size * self.settings.gradient_accumulation_steps

    @property
    def is_timed(self) -> bool:
        """True if hours can be predicted: on known GPUs, and not for the miniatures, which do not
        fill them.
        """
        is_miniature = self.settings.transformer_version.startswith("miniature")
        return self.config.model.device != "cpu" and self.hardware.rate > 0 and not is_miniature

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.config, self.world_size)

    @property
    def anchor_forwards(self) -> int:
        """Velocities of the anchor per rollout."""
        return self.plan.num_anchor_steps if self.config.objective.needs_anchor else 0

    @property
    def old_forwards(self) -> float:
        """Forward passes per rollout and branch for nft's old velocities: all levels of the
        rollouts of later updates, and one level of one rollout per replica, for the check; none
        with one update per iteration.
        """
        # with one video of a pair per pass, the errors of all videos are computed in advance
        if self.config.objective.group_size == 2 and self.config.rows_per_pass == 1:
            return self.plan.num_trained_steps
        if not self.config.objective.needs_old_velocities or self.plan.updates == 1:
            return 0.0
        return (
            self.plan.num_trained_steps * (1 - 1 / self.plan.updates)
            + 1 / self.rollouts_per_replica
        )

    @property
    def checked_forwards(self) -> float:
        """Forward passes per rollout, all branches, for nft's on-policy check: a replayed step and
        a noise level of one rollout per replica, every ``gate_interval`` iterations.
        """
        if not self.config.objective.needs_old_velocities or self.settings.gate_interval == 0:
            return 0.0
        branches = self.plan.sampled_branches + self.plan.trained_branches
        if self.parameters.is_flow_map:
            branches += 2 * self.plan.trained_branches
        # one rollout of all those of a replica, in one of gate_interval iterations
        return branches / self.rollouts_per_replica / self.settings.gate_interval

    @property
    def sampled_forwards(self) -> float:
        """Forward passes per rollout, all branches, that sample it; 0 for rated pairs."""
        if self.config.objective.videos_from:
            return 0.0
        return self.plan.sampled_branches * self.settings.grpo_sampling_steps

    @property
    def partner_forwards(self) -> float:
        """Forward passes per rollout, all branches, that the frozen expert of a model of two makes."""
        if self.config.objective.videos_from or self.config.trained_expert is None:
            return 0.0
        sampling = self.config.sampling
        return sum(
            branches
            for level, branches in zip(sampling.levels, sampling.branches())
            if not self.config.trains(level)
        )

    @property
    def forwards_without_gradient(self) -> float:
        """Forward passes per rollout, all branches: sampling, anchor means, nft's old velocities
        and its check, and derivatives of a flow map.
        """
        return (
            self.sampled_forwards
            + self.compared_forwards
            + self.checked_forwards
            + self.derivative_forwards
        )

    @property
    def derivative_forwards(self) -> float:
        """Forward passes per rollout, all branches, for the derivatives of a flow map: two at each
        trained noise level.
        """
        if self.config.objective.trains != "levels" or not self.parameters.is_flow_map:
            return 0.0
        return 2 * self.plan.trained_branches * self.plan.num_trained_steps

    @property
    def compared_forwards(self) -> float:
        """Forward passes per rollout, all branches: anchor means and nft's old velocities, the
        stage ``anchor``.
        """
        of_anchor = self.plan.anchor_branches * self.anchor_forwards
        return of_anchor + self.plan.trained_branches * self.old_forwards

    @property
    def forwards_with_gradient(self) -> float:
        """Forward passes with a backward pass per rollout, all branches."""
        return self.plan.trained_branches * (
            self.plan.num_trained_steps + self.plan.num_reward_steps
        )

    def samples_at_once(self, samples: int) -> int:
        """Return the batch size of a forward pass, branches included, for ``samples`` videos."""
        return samples * self.config.num_branches if self.settings.batched_forward == "true" else 1

    @property
    def backwards_per_update(self) -> int:
        """Backward passes per update; from the second on, gradients exist while activations are
        computed.
        """
        rows = math.ceil(self.rollouts_per_replica / self.config.objective.updates)
        columns = self.plan.num_trained_steps + self.plan.num_reward_steps
        return math.ceil(rows / self.settings.mini_batch_size_per_update) * columns

    @cached_property
    def problems(self) -> list[str]:
        """Reasons why the run is not legal."""
        heads = head_problems(self.settings.sp_size, self.architecture.num_attention_heads)
        return [*heads, *division_problems(self.config, self.world_size)]

    def with_settings(self, **changes) -> "PlannedRun":
        return replace(self, config=self.config.with_settings(**changes))


def num_validations(validation: ValidationSettings, max_steps: int) -> int:
    """Return the number of validations: before the first iteration, at every interval, and after
    the last one.
    """
    return validation.validate_at_step0 + math.ceil(max_steps / validation.validation_interval)
