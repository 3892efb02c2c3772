"""Content of a report, read from the output files of a run. `page` renders it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import yaml

from hyvideo.config.command_line import load_config
from hyvideo.config.run_plan import num_rollouts
from hyvideo.config.settings import Config
from hyvideo.data.files import folder_problem, parse_json, read_json, read_regular
from hyvideo.data.prompts import are_seen, read_requests
from hyvideo.data.run_folder import ROLLOUTS, SAMPLES, numbered
from hyvideo.distributed.checkpoint import complete
from hyvideo.records.metrics_file import read_metrics
from hyvideo.records.stage_timer import TIMELINE_FILE
from hyvideo.validation.intervals import Interval, t_interval
from hyvideo.validation.reward_hacking import rule
from hyvideo.validation.reward_hacking.monitor import MEASURES_FILE, read_history
from hyvideo.validation.reward_hacking.rule import MetricShift, ValidationStats
from hyvideo.validation.scores_file import mean_by_prompt


@dataclass(frozen=True)
class Run:
    """A run, read from its files, and results derived from them."""

    config: Config
    environment: dict
    rollouts_per_iteration: int
    lines: list[dict]  # of metrics.jsonl
    hours: list[float]  # cumulative, by iteration, without validations and checkpoints
    history: list[ValidationStats]  # validations with the same settings as the newest
    base: ValidationStats | None  # validation of the base model, if there is a later one
    shifts: list[list[MetricShift]]  # of the held-out metrics, by validation
    hacking: str  # description of reward hacking in the last validation; empty if none
    before: dict[int, dict]  # scores.json of the base model's validation, by number of the video
    after: dict[int, dict]  # scores.json of the newest validation; empty if that is the base model's
    reasons: Counter  # of missing rewards
    checkpoints: list[int]
    timeline: dict | None  # contents of timeline.json; runs of earlier versions have none

    @cached_property
    def gains(self) -> dict[int, float]:
        """Reward after minus before training, of each validation video that has both, by number."""
        pairs = {number: (entry["reward"], self.before[number]["reward"]) for number, entry in self.after.items()}
        return {number: pair[0] - pair[1] for number, pair in pairs.items() if None not in pair}

    @cached_property
    def gain(self) -> Interval | None:
        """Mean gain with its interval over the prompts; None without both validations."""
        return self.gain_over(self.gains)

    def gain_over(self, numbers: Iterable[int]) -> Interval | None:
        means = mean_by_prompt((self.after[number]["group"], self.gains[number]) for number in numbers)
        return t_interval(np.array([list(means.values())])) if means else None

    @cached_property
    def unseen(self) -> list[int]:
        """Videos of ``gains`` whose prompt is not in prompts_csv, by number; none if that file has moved."""
        try:
            training = read_requests(*self.config.data.prompts_csv)
        except ValueError:
            return []
        seen = are_seen([self.after[number]["prompt"] for number in self.gains], training)
        return [number for number, is_seen in zip(self.gains, seen) if not is_seen]

    @property
    def verdict(self) -> str:
        """``suspect``, ``better``, ``worse``, ``unclear``, or ``none`` without both validations."""
        if self.gain is None:
            return "none"
        change = "unclear" if not self.gain.excludes_zero else "better" if self.gain.mean > 0 else "worse"
        return "suspect" if self.hacking else change


def read_run(folder: Path) -> Run:
    """Read the run in a folder. Raises ValueError if there is no run or its records are corrupted."""
    if problem := folder_problem(folder):
        raise ValueError(f"{folder} must be the output_dir of a run: {problem}")
    config = load_config(folder / "config.yaml")
    path = folder / "metrics.jsonl"
    samples = folder / SAMPLES
    environment = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["environment"]
    lines = read_metrics(path) if path.is_file() else []
    history: list[ValidationStats] = []
    measured = [path / MEASURES_FILE for _, path in numbered(folder, SAMPLES) if (path / MEASURES_FILE).is_file()]
    if newest := measured[-1] if measured else None:
        made_with = parse_json(read_regular(newest))["made_with"]
        history = read_history(samples, made_with, before=int(newest.parent.name) + 1)
    before = _scores(samples / "000000") if history and history[0].iteration == 0 else {}
    after = _scores(newest.parent) if len(history) > 1 and before else {}
    base, threshold = rule.base_stats(history) if after else None, config.record.hacking_threshold
    found = rule.find_shifts(history, threshold) if base else []
    incomplete = [folder / ROLLOUTS / f"{line['iteration']:06d}" for line in lines if line["reward/missing"]]
    entries = [entry for scores in [*map(_scores, incomplete), before, after] for entry in scores.values()]
    timeline = folder / TIMELINE_FILE
    return Run(
        config=config,
        environment=environment,
        rollouts_per_iteration=num_rollouts(config, environment["processes"]),
        lines=lines,
        hours=(np.cumsum([line["time/iteration"] for line in lines]) / 3600).tolist(),
        history=history,
        base=base,
        shifts=[rule.all_shifts(base, now, threshold) if base else [] for now in history],
        hacking=rule.describe(history, found) if found else "",
        before=before,
        after=after,
        reasons=Counter(entry["reason"] or "unknown" for entry in entries if entry["missing"]),
        checkpoints=[int(path.name) for path in complete(folder)],
        timeline=read_json(timeline, "timeline") if timeline.is_file() else None,
    )


def _scores(folder: Path) -> dict[int, dict]:
    """Return the entries of a scores.json by number, each with the path of its file, or none without the file."""
    path = folder / "scores.json"
    try:
        entries = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else []
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    files = {file.name: str(file) for file in folder.glob("*.mp4")}  # those not deleted
    return {entry["number"]: entry | {"file": files.get(entry["file"])} for entry in entries}
