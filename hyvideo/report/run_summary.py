"""Summary that a run prints at its end."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hyvideo.files.files import optional
from hyvideo.files.text import Row, lines_of
from hyvideo.records.metrics_file import read_metrics
from hyvideo.report.page import REPORT_FILE
from hyvideo.validation.validation import Validation

_WIDTH = 22  # of the labels
_NUM_FIRST = 5  # iterations at each end of a run, whose mean rewards are compared
_SHOWN_ABOVE = ("reward", "seen/reward", "unseen/reward", "reward_std")


def print_summary(output_dir: Path, iteration: int, validation: Validation | None) -> None:
    """Print rewards before and after training, and the paths of the report, the videos and a
    picture of both.
    """
    before = validation.measures(0) if validation else {}
    after = validation.measures(iteration) if validation else {}
    metrics = read_metrics(output_dir / "metrics.jsonl")
    lines = ["", *_agreement(metrics)]
    if before and after:
        lines += _validated(validation, iteration, before, after)
    else:
        lines += _rollout_rewards(metrics)
    if after and not before:
        lines.append(
            f"{len(validation.seen)} validation videos of iteration {iteration}: reward "
            f"{after['reward']:.3f} ± {after['reward_std']:.3f}; the base model was not validated "
            "with these settings (validate_at_step0), so there is no comparison"
        )
    rows: list[Row] = []
    if (output_dir / REPORT_FILE).is_file():
        rows.append(("report:", str(output_dir / REPORT_FILE)))
    rows.append(("all output:", str(output_dir)))
    print("\n".join(lines + lines_of(rows, _WIDTH)))


def _validated(
    validation: Validation, iteration: int, before: Mapping[str, float], after: Mapping[str, float]
) -> list[str]:
    """Return the rewards and metrics of the base model and of the trained policy, and where both
    videos are.
    """
    frames, height, width = validation.size
    weights = validation.scorer.weights
    lines = [
        f"{len(validation.seen)} validation videos, same prompts and seeds, iteration 0 -> "
        f"{iteration}; {frames} frames of {height} x {width}; ± standard deviation over videos",
        _reward(before, after),
    ]
    num_seen = sum(validation.seen)
    num_unseen = len(validation.seen) - num_seen
    if "seen/reward" in before and "seen/reward" in after:
        lines.append(
            f"{_change('seen/reward', before, after)}, {num_seen} videos, prompts also used in "
            "training"
        )
    if "unseen/reward" in before and "unseen/reward" in after:
        lines.append(
            f"{_change('unseen/reward', before, after)}, {num_unseen} videos, prompts not used in "
            "training"
        )
    common = [name for name in sorted(after) if name in before and name != "missing"]
    for name, weight in weights.items():
        if weight and name in common:
            lines.append(f"{_change(name, before, after)}, weight {weight:g}")
    lines.append("other metrics")
    unchanged = []
    for name in common:
        if name in _SHOWN_ABOVE or weights.get(name):
            continue
        if f"{before[name]:.3f}" == f"{after[name]:.3f}":
            unchanged.append(f"{name} {after[name]:.3f}")
        else:
            lines.append(_change(name, before, after))
    lines.append(f"  unchanged: {', '.join(unchanged) or 'none'}")
    picture = None
    with optional("before_after.png", (OSError, ValueError, LookupError, TypeError)):
        picture = validation.picture(iteration)
    rows = []
    if picture:
        rows.append(("side by side:", str(picture)))
    rows.append(("videos:", f"{validation.folder(0)} and {validation.folder(iteration)}"))
    return lines + lines_of(rows, _WIDTH)


def _change(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    return f"  {name:<20} {before[name]:.3f} -> {after[name]:.3f}"


def _reward(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return the rewards with their standard deviations, and the gain, also in those of the base
    model.
    """
    gain = after["reward"] - before["reward"]
    values = [
        f"{measures['reward']:.3f} ± {measures['reward_std']:.3f}" for measures in (before, after)
    ]
    text = f"  {'reward':<20} {values[0]} -> {values[1]}, {gain:+.3f}"
    if before["reward_std"] > 0:
        text += f", {gain / before['reward_std']:+.2f} base standard deviations"
    return text


def _agreement(metrics: Sequence[Mapping]) -> list[str]:
    """Return the agreement with the held-out pairs of objective dpo, if it was measured."""
    name = "dpo/held_out_accuracy"
    measured = [line[name] for line in metrics if name in line]
    return [
        f"agreement with held-out answers: {share:.0%} (base model: 50 %)"
        for share in measured[-1:]
    ]


def _rollout_rewards(metrics: Sequence[Mapping]) -> list[str]:
    """Return the mean reward of the rollouts in the first and in the last iterations; none if they
    are not scored.
    """
    if metrics and not any("reward/mean" in line for line in metrics):
        return []
    rewards = [line["reward/mean"] for line in metrics if line.get("reward/mean") is not None]
    if not rewards:
        return ["no rollout had a reward"]
    few = min(_NUM_FIRST, len(rewards) // 2)
    if not few:
        return [f"mean rollout reward: {rewards[0]:.3f} in the only iteration"]
    return [
        f"mean rollout reward: {sum(rewards[:few]) / few:.3f} in the first {few} iterations -> "
        f"{sum(rewards[-few:]) / few:.3f} in the last {few}"
    ]
