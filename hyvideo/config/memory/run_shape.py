"""The settings that decide memory, cost and legality of a run, under the names of the flags."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from hyvideo.config.run_plan import make_plan
from hyvideo.config.settings import Config

Checkpointing = Literal["none", "full", "selective"]

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class RunShape:
    """One run on ``world_size`` GPUs. Fields without a comment are the settings of that name."""

    world_size: int
    sp_size: int
    enable_fsdp: bool
    batch_size: int
    num_generations: int
    frames: int
    height: int
    width: int
    dp_replicate: int = 1  # HSDP: replicas of the shards
    reshard_after_forward: bool = True
    activation_checkpointing: Checkpointing = "full"  # selective keeps the attention's outputs
    master_weight_type: Literal["fp32", "bf16"] = "fp32"
    dtype: Literal["fp32", "bf16"] = "bf16"
    lora_rank: int = 0  # 0 trains everything
    use_muon: bool = False
    muon_scope: Literal["hidden", "all"] = "hidden"
    ema_decay: float = 0.0  # 0 keeps no average
    has_anchor: bool = True
    anchor_weight_type: Literal["fp32", "bf16"] | None = None  # that of the policy by default
    reference_mode_offload: bool = False
    anchor_in_update: bool = False  # its means are computed step by step in the update
    num_branches: int = 1  # 2 with guidance
    batch_guidance: bool = True
    mini_batch_size_per_update: int = 1
    gradient_accumulation_steps: int = 1
    num_updates_per_rollout: int = 1
    grpo_sampling_steps: int = 20
    trained_steps: int = 20  # of each rollout, in one update
    text_tokens: int = 300  # of the longest prompt
    foreach_optimizer: bool = False  # which holds one temporary of the gradients' size; the fused one holds none
    encoder_dtype: Literal["fp32", "bf16", "fp16"] = "fp16"
    precompute_conditions: bool = False
    has_images: bool = False  # an image-to-video version: SigLIP is needed
    vae_dtype: Literal["fp32", "bf16", "fp16"] = "fp16"
    vae_tile_size: int = 256
    vae_tile_overlap: float = 0.125
    decode_batch_size: int = 1
    reward_bytes: float = 0.0  # weights of the scorers on the GPU

    @staticmethod
    def of(config: Config, world_size: int, *, text_tokens: int = 300) -> "RunShape":
        """The shape of a run with these settings."""
        settings = config.flat()
        if not settings["enable_gradient_checkpointing"]:
            settings["activation_checkpointing"] = "none"
        names = {field.name for field in dataclasses.fields(RunShape)}
        by_name = {name: value for name, value in settings.items() if name in names}
        by_name |= {"frames": settings["sample_n_frames"], "text_tokens": text_tokens}
        return RunShape(
            world_size=world_size,
            has_anchor=config.needs_anchor,
            anchor_in_update=settings["kl_compute_mode"] == "training_phase",
            num_branches=2 if settings["cfg_scale"] > 1 else 1,
            trained_steps=make_plan(config, world_size).num_trained_steps,
            has_images="i2v" in settings["transformer_version"],
            reward_bytes=_reward_bytes(config),
            **by_name,
        )

    @property
    def replicas(self) -> int:
        """Number of whole data-parallel replicas."""
        return self.world_size // self.sp_size

    @property
    def num_shards(self) -> int:
        """Number of ranks that share one copy of the parameters."""
        return max(1, self.world_size // self.dp_replicate) if self.enable_fsdp else 1

    @property
    def master_bytes(self) -> int:
        return 4 if self.lora_rank else BYTES[self.master_weight_type]

    @property
    def anchor_bytes(self) -> int:
        return BYTES[self.anchor_weight_type] if self.anchor_weight_type else self.master_bytes

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.dtype]

    @property
    def rollouts_per_replica(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def backwards_per_update(self) -> int:
        """Number of backward passes; from the second on, gradients are there while the activations are made."""
        rows = math.ceil(self.rollouts_per_replica / self.num_updates_per_rollout)
        return math.ceil(rows / self.mini_batch_size_per_update) * self.trained_steps


# Bytes of weights. VideoAlign is Qwen2-VL-2B without its head; CLIP's ViT-L and PickScore's ViT-H are in float32.
_VIDEOALIGN = {"bf16": 4.57e9, "fp32_math": 9.2e9}
_SCORERS = {"clip": 0.43e9 * 4, "pickscore": 0.99e9 * 4}


def _reward_bytes(config: Config) -> float:
    reward = config.reward
    if reward.reward_offload or reward.remote_reward_url:
        return 0.0
    sizes = _SCORERS | {"videoalign": _VIDEOALIGN[reward.reward_precision]}
    return sum(sizes.get(name, 0.0) for name in reward.reward_model)
