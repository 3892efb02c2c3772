"""Settings of a rehearsal: the settings of the run, except what a CPU, random weights and one machine
require.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyvideo.checks.layout import batch_problems
from hyvideo.data.prompts import Request
from hyvideo.settings.config import Config
from hyvideo.settings.reward_settings import reward_options

NUM_VIDEOS = 2  # per validation and per group
NUM_BATCHES = 2  # of rollouts per iteration


@dataclass(frozen=True)
class Change:
    """A setting whose value differs from the run."""

    name: str
    value: Any
    reason: str

    @property
    def shown(self) -> str:
        """Value for a message, without the paths of the rehearsal's own files."""
        is_path = self.name in (
            "pretrained_model_root",
            "output_dir",
            "valid_video_csv",
            "reward_config",
        )
        return "its own" if is_path else str(self.value)


def processes_of(config: Config) -> int:
    """Return the smallest number of processes with the layout of the run: shards, replicas and
    shared videos.
    """
    distributed = config.distributed
    if distributed.enable_fsdp and distributed.dp_replicate > 1:
        return 4 * distributed.sp_size  # two copies of a model that is sharded over two replicas
    return 2 * distributed.sp_size


def heads_of(config: Config) -> int:
    """Return the attention heads of the tiny transformer: at least one for each rank that shares a
    video.
    """
    return max(2, config.distributed.sp_size)


def reduced(config: Config, world_size: int, *, folder: Path, validated: bool) -> list[Change]:
    """Return the settings that a rehearsal on ``world_size`` processes changes.

    Args:
        config: Settings of the run.
        folder: Folder of the rehearsal, with the tiny checkpoints and validation prompts.
        validated: Whether the run has validation prompts.
    """
    cpu = "it runs on a CPU"
    few = "it samples few videos"
    tiny = "its models have random weights"
    own = "it must not touch the output of a run"
    once = "it runs every stage at every iteration"
    changes = [
        Change("device", "cpu", cpu),
        Change("enable_compile", "false", cpu),
        Change("attention_kernel", "auto", cpu),
        Change("num_threads", 0, cpu),
        Change("pretrained_model_root", str(folder / "checkpoints"), tiny),
        Change("random_weights", False, tiny),
        *(
            Change(name, "", "a LoRA of the released model does not fit a tiny one")
            for name in ("pretrained_lora_path", "base_lora_path", "low_noise_base_lora_path")
        ),
        Change(
            "anchor_path", "", "another teacher of the released size does not fit a tiny student"
        ),
        Change("output_dir", str(folder / "run"), own),
        Change("conditions_dir", "", own),
        Change("resume_from_checkpoint", "auto", "it begins a new run, and continues that"),
        Change("max_steps", 1, "it trains one iteration, and a second one after a restart"),
        Change("save_interval", 1, once),
        Change("log_video_interval", 1, once),
        Change("validation_interval", 1, once),
        Change("validation_repeats", 1, few),
        Change(
            "validation_batch_size", min(config.validation.validation_batch_size, NUM_VIDEOS), few
        ),
        Change("log_num_videos", min(config.record.log_num_videos, NUM_VIDEOS), few),
        Change("max_missing_fraction", 0.0, "a reward that fails on one video is a failure"),
        Change("max_bad_updates", 1, "an update with NaN is a failure"),
        Change("reward_config", _reward_config(config, folder), tiny),
        Change(
            "report_to",
            [name for name in config.record.report_to if name in ("tensorboard", "none")],
            "it uses no network",
        ),
        *_batches(config, world_size, few),
    ]
    if config.model.vae_dtype != "fp32":
        changes.append(
            Change("vae_dtype", "fp32", "16 bits take seven to forty times as long on a CPU")
        )
    if config.objective.checks_velocities:
        reason = f"velocities of random weights fail the check of {config.objective.name}"
        changes.append(Change("gate_interval", 0, reason))
    if validated:
        changes.append(Change("valid_video_csv", [str(folder / "valid.csv")], few))
    before = config.flat()
    return [change for change in changes if before[change.name] != change.value]


def _reward_config(config: Config, folder: Path) -> str:
    """Return the options of the scorers, with the folders of the tiny models."""
    options = reward_options(config.reward)
    for name, given in options.items():
        if (folder / "rewards" / name).exists():
            given.pop("processor", None)
            given.pop("base", None)
            given["path"] = str(folder / "rewards" / name)
    return json.dumps(options)


def _batches(config: Config, world_size: int, reason: str) -> list[Change]:
    """Return groups of two rollouts or given videos, in as few batches as the updates need, with the layout of the
    run's groups.
    """
    rollout = config.rollout
    batches = min(NUM_BATCHES, rollout.gradient_accumulation_steps)
    has_shared_groups = rollout.batch_size < rollout.num_generations  # over several replicas
    size = 1 if has_shared_groups and world_size > config.distributed.sp_size else 2
    distributed = config.distributed
    replicate = 2 if distributed.dp_replicate > 1 else 1
    group = config.objective.group_size or 2
    tried = config.with_settings(
        num_generations=group, gradient_accumulation_steps=batches, dp_replicate=replicate
    )
    replicas = world_size // config.distributed.sp_size
    updates = config.objective.updates
    while list(batch_problems(tried.with_settings(batch_size=size).rollout, replicas, updates)):
        size = 2 if size == 1 else size + 2
    rows = min(config.objective.mini_batch_size_per_update, size * batches)
    return [
        Change("num_generations", group, reason),
        Change("gradient_accumulation_steps", batches, reason),
        Change("batch_size", size, reason),
        Change("dp_replicate", replicate, reason),
        Change("mini_batch_size_per_update", rows, reason),
    ]


def validation_requests(requests: list[Request]) -> list[Request]:
    """Return the longest prompt and one that adds an image or quoted text, which other encoders
    encode.
    """
    by_length = sorted(requests, key=lambda request: len(request.prompt), reverse=True)
    longest = by_length[0]
    others = [
        request for request in by_length[1:] if '"' in request.prompt or "“" in request.prompt
    ]
    return [longest, *(others or by_length[1:])[: NUM_VIDEOS - 1]]
