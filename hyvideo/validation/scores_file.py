"""Scores of videos: means and intervals, and the files of an evaluation. Imports no torch."""

import json
import math
import statistics
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hyvideo.data.prompts import Request, are_seen
from hyvideo.files.files import read_json
from hyvideo.files.tables import csv_text
from hyvideo.files.text import align_columns, describe_error
from hyvideo.records.run_files import write_json, write_text
from hyvideo.rewards.rewards import Reward, overall
from hyvideo.validation.intervals import Interval, in_range, t_interval

NOT_SCORES = ("number", "seed", "group", "missing", "seen")


def summarise_rewards(rewards: list[Reward]) -> dict[str, float]:
    """Return means over the scored videos, with the standard deviation of ``reward`` and the number
    of missing ones.
    """
    scored = [reward for reward in rewards if not reward.is_missing]
    totals = [reward.total for reward in scored]
    dimensions = dict.fromkeys(name for reward in rewards for name in reward.scores)
    means = {
        name: _finite_mean([reward.scores.get(name, math.nan) for reward in scored])
        for name in dimensions
    }
    return means | {
        "reward": _finite_mean(totals),
        "reward_std": statistics.pstdev(totals) if totals else math.nan,
        **overall(means, "Overall"),
        "missing": float(len(rewards) - len(scored)),
    }


def split_reward(rewards: list[Reward], seen: Sequence[bool]) -> dict[str, float]:
    """Return the mean rewards of the videos with prompts seen and unseen in training; empty without
    both kinds.
    """
    if len(set(seen)) < 2:
        return {}
    pairs = list(zip(rewards, seen))
    return {
        "seen/reward": _finite_mean([reward.total for reward, is_seen in pairs if is_seen]),
        "unseen/reward": _finite_mean([reward.total for reward, is_seen in pairs if not is_seen]),
    }


@dataclass(frozen=True)
class Evaluation:
    """Scores of one policy, or of a folder of videos."""

    # number, prompt, group (index of the prompt), reward, scores, held-out metrics of the video
    videos: list[dict]
    measures: dict[str, float | None]  # held-out metrics of the whole set, such as frechet_distance


def mark_seen(evaluation: Evaluation, training: Iterable[Request]) -> Evaluation:
    """Add ``seen`` to every video: whether its prompt is a ``training`` prompt.

    No change if all or none are.
    """
    seen = are_seen((entry["prompt"] for entry in evaluation.videos), training)
    if len(set(seen)) < 2:
        return evaluation
    videos = [entry | {"seen": each} for entry, each in zip(evaluation.videos, seen)]
    return replace(evaluation, videos=videos)


def summarise(evaluation: Evaluation) -> dict[str, Interval]:
    """Return mean and t interval over the prompts of every score, and metrics of the whole set
    without an interval.
    """
    entries = [entry.items() for entry in evaluation.videos]
    names = dict.fromkeys(
        name for items in entries for name, value in items if isinstance(value, (int, float))
    )
    summary = {}
    for name in (name for name in names if name not in NOT_SCORES):
        values = mean_by_prompt((entry["group"], entry.get(name)) for entry in evaluation.videos)
        summary[name] = in_range(t_interval(np.array([list(values.values())])), name)
    set_only = {
        name: value
        for name, value in evaluation.measures.items()
        if name not in summary and value is not None
    }
    return summary | {name: t_interval(np.array([[value]])) for name, value in set_only.items()}


def mean_by_prompt(pairs: Iterable[tuple[Hashable, float | None]]) -> dict[Hashable, float]:
    """Return the mean of each prompt, over the values that are not None, from pairs of prompt and
    value.
    """
    values_of: dict[Hashable, list[float]] = {}
    for prompt, value in pairs:
        if value is not None:
            values_of.setdefault(prompt, []).append(value)
    return {prompt: float(np.mean(values)) for prompt, values in values_of.items()}


def as_text(summary: dict[str, Interval]) -> str:
    """Format mean and interval, one line per metric."""
    rows = []
    for name, value in summary.items():
        interval = f"[{value.low:.4f}, {value.high:.4f}]" if value.low < value.high else ""
        rows.append((name, f"{value.mean:9.4f}", interval))
    return "\n".join(align_columns(rows))


def write_evaluation(path: Path, evaluation: Evaluation, identity: dict) -> None:
    """Write an evaluation as JSON; ``identity`` describes the policy and the settings that it was
    evaluated with.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    summary = {name: value.as_json() for name, value in summarise(evaluation).items()}
    content = {
        "of": identity,
        "summary": summary,
        "measures": evaluation.measures,
        "videos": evaluation.videos,
    }
    write_json(path, content)


def read_evaluation(path: Path, identity: dict) -> Evaluation | None:
    """Return the stored evaluation if its identity is the same, else None, also for a corrupted
    file.
    """
    if not path.is_file():
        return None
    try:
        content = read_json(path, "stored evaluation")
        if content["of"] != json.loads(json.dumps(identity)):
            return None
        return Evaluation(content["videos"], content["measures"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        print(
            f"{path} is corrupted and ignored ({describe_error(error)})",
            file=sys.stderr,
            flush=True,
        )
        return None


def write_csv(path: Path, rows: Iterable[Mapping]) -> None:
    """Write rows as CSV; the columns are the keys of all rows."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    write_text(path, csv_text(columns, [[row.get(name) for name in columns] for row in rows]))


def _finite_mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan
