"""Contents of a comparison, read from several folders. `page` renders it.

A folder is recognized by its files, and may be of several kinds:

    config.yaml             output_dir of a run
    scores.json             evaluation by scripts.evaluate, for example of the guided base model
    analysis.json           preference study, analyzed by scripts.preference_study
    mp4 and JSON files      videos of generate.py or scripts.compare_policies

Any other folder stands for the runs below it.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hyvideo.files.files import read_json
from hyvideo.report.contents import CONFIG_FILE, MAX_POINTS, RunContents, read_run
from hyvideo.report.gallery import find_videos, short_names
from hyvideo.settings.config import LEAVES, Config
from hyvideo.settings.reward_settings import reward_weights
from hyvideo.settings.sections import RewardSettings
from hyvideo.validation.scores_file import Evaluation, summarise

FILES = {"evaluations": "scores.json", "studies": "analysis.json"}
# mean, low and high of a 95 % interval over the prompts, by score
Scores = dict[str, dict[str, float | None]]


@dataclass(frozen=True)
class Comparison:
    """Contents of the folders, by the name of the folder."""

    runs: dict[str, RunContents]
    evaluations: dict[str, dict]
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
            base = _scores(run.before, run.history[0].means) if run.before else {}
            if base and base not in found.values():
                label = f"base model of {name}" if found else "base model"
                found[label] = base
            if run.after:
                found[name] = _scores(run.after, run.history[-1].means)
        return found | {name: content["summary"] for name, content in self.evaluations.items()}


def read_comparison(folders: Iterable[Path], max_points: int = MAX_POINTS) -> Comparison:
    """Read folders of every kind, runs with at most ``max_points`` points in a curve.

    Raises ValueError for a folder of no kind or with corrupted records.
    """
    places = list(folders)
    found = Comparison(runs={}, evaluations={}, studies={}, videos={})
    for folder, name in zip(places, short_names(places)):
        size = found.size
        for kind, file in FILES.items():
            if (folder / file).is_file():
                getattr(found, kind)[name] = read_json(folder / file, str(folder))
        if next(find_videos(folder), None):
            found.videos[name] = folder
        if (folder / CONFIG_FILE).is_file() or found.size == size:
            found.runs[name] = read_run(folder, max_points)
    return found


def with_runs_below(folders: Iterable[Path]) -> list[Path]:
    """Return the folders, with the runs below a folder in place of one of no kind."""
    found: list[Path] = []
    for folder in folders:
        names = (CONFIG_FILE, *FILES.values())
        is_known = any((folder / name).is_file() for name in names) or any(find_videos(folder))
        runs = [] if is_known else find_runs(folder)
        found += runs or [folder]
    return found


def find_runs(folder: Path) -> list[Path]:
    """Return the output folders of the runs below a folder, in the order of their paths."""
    found = []
    for place, folders, files in os.walk(folder):
        if CONFIG_FILE in files:
            found.append(Path(place))
            folders.clear()  # a run has no runs inside
    return sorted(found)


def reward_of(reward: RewardSettings) -> str:
    """Return the trained reward as text: runs with different texts have rewards that cannot share
    an axis.
    """
    weights = ", ".join(
        f"{name} {weight:g}" for name, weight in reward_weights(reward).items() if weight
    )
    options = f", options {reward.reward_config}" if reward.reward_config else ""
    normalized = ", normalized in groups" if reward.reward_normalization == "group" else ""
    return f"{' + '.join(reward.reward_model)}: {weights}{options}{normalized}"


def differing_settings(configs: Mapping[str, Config]) -> list[str]:
    """Return the settings that have several values among the runs, also the seed; first those that
    affect learning.
    """
    flats = [shown_settings(config) for config in configs.values()]
    # runs of different objectives have different settings
    names = dict.fromkeys(name for flat in flats for name in flat if name != "output_dir")
    found = [name for name in names if len({str(flat.get(name)) for flat in flats}) > 1]
    return sorted(found, key=lambda name: LEAVES[name].decides != "learning")


def shown_settings(config: Config) -> dict[str, object]:
    """Return the settings of a run, without `prompts_csv` if it trains on given videos."""
    settings = config.flat()
    if config.objective.videos_from:
        del settings["prompts_csv"]
    return settings


def setting_text(value: object) -> str:
    """Return the value of a setting as text."""
    if value is None or value == "" or value == []:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {setting_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(setting_text, value))
    return str(value)


def _scores(entries: dict[int, dict], validated: Mapping[str, float]) -> Scores:
    """Return every score of a validation, and its metrics of the whole set without an interval."""
    means = {
        name: value for name, value in validated.items() if name not in ("reward_std", "missing")
    }
    summary = summarise(Evaluation(list(entries.values()), means))
    return {name: interval.as_json() for name, interval in summary.items()}
