"""What a run says at its start and in the end."""

import json
import statistics
from pathlib import Path

from hyvideo.config.run_plan import describe
from hyvideo.config.without_effect import settings_without_effect
from hyvideo.evaluation.validation import Validation
from hyvideo.records.metrics_file import whole_lines


def print_start(trainer) -> None:
    trained = sum(parameter.numel() for parameter in trainer.policy.parameters)
    print(describe(trainer.config, trainer.plan))
    print(f"training               {trained / 1e6:.2f} million parameters on {trainer.device}")
    print_without_effect(settings_without_effect(trainer.config, trainer.plan, trainer.mesh.world_size))
    begin = f"resuming after iteration {trainer.iteration}" if trainer.resumed else "a new run"
    for sentence in trainer.changed_settings:
        print(f"changed since then     {sentence}")
    print(f"output                 {trainer.output_dir}, {begin}", flush=True)


def print_without_effect(sentences: list[str]) -> None:
    """Prints the settings that cannot change this run, each with its reason."""
    for number, sentence in enumerate(sentences):
        print(("does nothing here      " if number == 0 else " " * 23) + sentence)


def print_summary(trainer) -> None:
    """Reward before and after with its spread, where the videos are, and a picture of both."""
    print()
    validation = trainer.validation
    if validation and validation.has(0) and validation.has(trainer.iteration):
        print("\n".join(_validation_lines(validation, trainer.iteration)))
    else:
        print(_training_line(trainer.output_dir / "metrics.jsonl"))
    print(f"metrics, videos and checkpoints are in {trainer.output_dir}")


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
