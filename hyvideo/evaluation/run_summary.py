"""Lines that a run prints in the end, and the kernel that it names at its start."""

import json
import statistics
from pathlib import Path

import torch

from hyvideo.config.memory.model_sizes import read_architecture
from hyvideo.config.sections import ModelSettings
from hyvideo.evaluation.validation import Validation
from hyvideo.models.attention_kernels import profiled_attention_kernel
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import DTYPES
from hyvideo.records.metrics_file import whole_lines

_PROFILED_TOKENS = 2048  # at most; more take a CPU seconds, and run on the same kernel


def attention_kernel(settings: ModelSettings, sp_size: int, size: tuple[int, int, int], device: torch.device) -> str:
    """Name of the kernel that a call with a rank's heads ran on, perhaps shortened: some are hundreds of letters."""
    model = read_architecture(settings.pretrained_model_root, settings.transformer_version)
    heads = max(1, model.num_attention_heads // sp_size)
    tokens = min(_PROFILED_TOKENS, model.image_tokens(*size))
    kernel = profiled_attention_kernel(device, DTYPES[settings.dtype], heads, model.attention_head_dim, tokens)
    return kernel if len(kernel) <= 120 else f"{kernel[:120]}..."


def print_summary(output_dir: Path, iteration: int, validation: Validation | None) -> None:
    """Prints the reward before and after with its spread, and where the videos and a picture of both are."""
    before, after = (validation.measures(k) for k in (0, iteration)) if validation else ({}, {})
    print()
    if after and before:
        print("\n".join(_validation_lines(validation, iteration)))
    else:
        print(_training_line(output_dir / "metrics.jsonl"))
    if after and not before:
        print(
            f"{len(validation.prompts)} validation videos of iteration {iteration}: reward {after['reward']:.3f} ± "
            f"{after['reward_std']:.3f}; the base has no such validation (validate_at_step0), so there is no before "
            "and after"
        )
    print(f"metrics, videos and checkpoints are in {output_dir}")


def _validation_lines(validation: Validation, iteration: int) -> list[str]:
    before, after = validation.measures(0), validation.measures(iteration)
    gain = after["reward"] - before["reward"]
    in_spreads = f" = {gain / before['reward_std']:+.2f} of the base's spread" if before["reward_std"] > 0 else ""
    lines = [
        f"{len(validation.prompts)} validation videos, same prompts and seeds, iteration 0 -> {iteration}",
        f"  reward {before['reward']:.3f} ± {before['reward_std']:.3f} -> {after['reward']:.3f} ± "
        f"{after['reward_std']:.3f}   ({gain:+.3f}{in_spreads})",
    ]
    others = [name for name in after if name not in ("reward", "reward_std", "missing") and name in before]
    lines += [f"  {name:<20} {before[name]:.3f} -> {after[name]:.3f}" for name in others]
    picture = validation.picture(iteration)
    if picture:
        lines.append(f"pictures of both: {picture}")
    lines.append(f"videos of both:   {validation.folder(0)} and {validation.folder(iteration)}")
    return lines


def _training_line(path: Path) -> str:
    rewards = [json.loads(line)["reward/mean"] for _, line in whole_lines(path)]
    rewards = [reward for reward in rewards if reward is not None]
    if not rewards:
        return "no rollout had a reward"
    few = min(5, len(rewards))
    first, last = statistics.fmean(rewards[:few]), statistics.fmean(rewards[-few:])
    return f"reward of the rollouts: {first:.3f} in the first {few} iterations -> {last:.3f} in the last {few}"
