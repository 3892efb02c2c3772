"""What an evaluation is: every score of every video and the measures of the set; in sum, and as a file."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hyvideo.evaluation.table2.bootstrap import Interval, bootstrap_interval
from hyvideo.records.run_files import write_json, write_text

NOT_SCORES = ("number", "seed", "group", "missing")


@dataclass(frozen=True)
class Evaluation:
    """What was measured of one policy, or of a folder of videos."""

    videos: list[dict]  # number, prompt, group (place of the prompt), reward, scores, held-out measures of the video
    measures: dict[str, float | None]  # of the whole set: held-out, such as frechet_distance


def summarise(evaluation: Evaluation, *, seed: int = 0) -> dict[str, Interval]:
    """Mean and bootstrap interval over the prompts of every score, and the measures that only the set has.

    Args:
        seed: Of the bootstrap.
    """
    scores = [name for name in _names(evaluation.videos) if name not in NOT_SCORES]
    summary = {}
    for name in scores:
        values = by_prompt(evaluation.videos, lambda entry, name=name: entry.get(name))
        if values:
            summary[name] = bootstrap_interval(np.array([list(values.values())]), seed=seed)
    of_set = {name: value for name, value in evaluation.measures.items() if name not in summary and value is not None}
    return summary | {name: Interval(value, value, value) for name, value in of_set.items()}


def by_prompt(videos: Iterable[dict], value_of: Callable[[dict], float | None]) -> dict[int, float]:
    """Mean over the videos of each prompt that have a value."""
    found: dict[int, list[float]] = {}
    for entry in videos:
        value = value_of(entry)
        if value is not None:
            found.setdefault(entry["group"], []).append(value)
    return {prompt: float(np.mean(values)) for prompt, values in found.items()}


def as_text(summary: dict[str, Interval]) -> str:
    """A line for each measure."""
    lines = []
    for name, value in summary.items():
        interval = f"  [{value.low:.4f}, {value.high:.4f}]" if value.low < value.high else ""
        lines.append(f"{name:<20} {value.mean:>9.4f}{interval}")
    return "\n".join(lines)


def write_evaluation(path: Path, evaluation: Evaluation, identity: dict) -> None:
    """One JSON file; ``identity`` says of what, and under which settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    summary = {name: asdict(value) for name, value in summarise(evaluation).items()}
    content = {"of": identity, "summary": summary, "measures": evaluation.measures, "videos": evaluation.videos}
    write_json(path, content)


def read_evaluation(path: Path, identity: dict) -> Evaluation | None:
    """An evaluation of the same thing under the same settings, or None where the file has none."""
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["of"] != json.loads(json.dumps(identity)):
        return None
    return Evaluation(content["videos"], content["measures"])


def write_scores_csv(path: Path, evaluation: Evaluation) -> None:
    """A row for each video."""
    text = io.StringIO()
    names = [name for name in dict.fromkeys(name for entry in evaluation.videos for name in entry)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(evaluation.videos)
    write_text(path, text.getvalue())


def finite_or_none(value: float) -> float | None:
    """As JSON can say it."""
    return value if math.isfinite(value) else None


def _names(videos: list[dict]) -> list[str]:
    """Fields that hold a number in some video."""
    is_number = {name for entry in videos for name, value in entry.items() if isinstance(value, (int, float))}
    return [name for name in dict.fromkeys(name for entry in videos for name in entry) if name in is_number]
