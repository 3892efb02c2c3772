"""Contents of a comparison, read from several folders. `page` renders it.

A folder is recognized by its files, and may be of several kinds:

    config.yaml             output_dir of a run
    scores.json             evaluation by scripts.evaluate, for example of the guided base model
    benchmarks.json         results of benchmarks, read back by scripts.benchmark_videos
    analysis.json           preference study, analysed by scripts.preference_study
    mp4 and JSON files      videos of generate.py or scripts.compare_policies
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyvideo.data.files import read_json
from hyvideo.report.contents import MAX_POINTS, Run, read_run
from hyvideo.report.gallery import find_videos, short_names
from hyvideo.validation.reward_hacking.rule import ValidationStats
from hyvideo.validation.scores_file import Evaluation, summarise

FILES = {"evaluations": "scores.json", "benchmarks": "benchmarks.json", "studies": "analysis.json"}
# mean, low and high of a 95 % interval over the prompts, by score
Scores = dict[str, dict[str, float | None]]


@dataclass(frozen=True)
class Comparison:
    """Contents of the folders, by the name of the folder."""

    runs: dict[str, Run]
    evaluations: dict[str, dict]
    benchmarks: dict[str, dict]
    studies: dict[str, dict]
    videos: dict[str, Path]

    @property
    def size(self) -> int:
        return sum(map(len, vars(self).values()))

    @property
    def scores(self) -> dict[str, Scores]:
        """Scores by policy: base models, each once, and runs, from their validations;
        evaluations.
        """
        found: dict[str, Scores] = {}
        for name, run in self.runs.items():
            base = _scores(run.before, run.history[0]) if run.before else {}
            if base and base not in found.values():
                found[f"base model of {name}" if found else "base model"] = base
            if run.after:
                found[name] = _scores(run.after, run.history[-1])
        return found | {name: content["summary"] for name, content in self.evaluations.items()}


def read_comparison(folders: Sequence[Path], max_points: int = MAX_POINTS) -> Comparison:
    """Read folders of every kind, runs with at most ``max_points`` points in a curve.

    Raises ValueError for a folder of no kind or with corrupted records.
    """
    found = Comparison({}, {}, {}, {}, {})
    for folder, name in zip(folders, short_names(folders)):
        size = found.size
        for kind, file in FILES.items():
            if (folder / file).is_file():
                getattr(found, kind)[name] = read_json(folder / file, str(folder))
        if next(find_videos(folder), None):
            found.videos[name] = folder
        if (folder / "config.yaml").is_file() or found.size == size:
            found.runs[name] = read_run(folder, max_points)
    return found


def _scores(entries: dict[int, dict], stats: ValidationStats) -> Scores:
    """Return every score of a validation, and its metrics of the whole set without an interval."""
    means = {
        name: value for name, value in stats.means.items() if name not in ("reward_std", "missing")
    }
    summary = summarise(Evaluation(list(entries.values()), means))
    return {name: interval.as_json() for name, interval in summary.items()}
