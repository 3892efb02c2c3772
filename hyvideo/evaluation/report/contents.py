"""What a report says of a run, gathered from the files that the run leaves. It knows no page."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import yaml

from hyvideo.config.command_line import load_config
from hyvideo.config.run_plan import make_plan
from hyvideo.config.settings import Config
from hyvideo.data.outside import parse_json
from hyvideo.distributed.checkpoint import complete
from hyvideo.evaluation.reward_hacking import rule
from hyvideo.evaluation.reward_hacking.monitor import MEASURES_FILE, read_history
from hyvideo.evaluation.reward_hacking.rule import MetricShift, ValidationStats
from hyvideo.evaluation.scores_file import by_prompt
from hyvideo.evaluation.studies.intervals import Interval, t_interval
from hyvideo.evaluation.validation import FOLDER as SAMPLES
from hyvideo.records.metrics_file import whole_lines
from hyvideo.training.rollout_records import FOLDER as ROLLOUTS


@dataclass(frozen=True)
class Run:
    """A run by its files, and what follows from them."""

    config: Config
    environment: dict
    rollouts_per_iteration: int
    lines: list[dict]  # of metrics.jsonl
    hours: list[float]  # of the iterations up to the end of each: validations and checkpoints are not counted
    history: list[ValidationStats]  # the validations that were made as the newest
    base: ValidationStats | None  # the validation before training, where another came after it
    shifts: list[list[MetricShift]]  # of the held-out measures, by validation
    hacking: str  # the sentence on reward hacking as of the last validation; empty without
    before: dict[int, dict]  # scores.json of the base's validation, by number of the video
    after: dict[int, dict]  # and of the newest; empty where that is the base's
    reasons: Counter  # of missing rewards
    checkpoints: list[int]

    @cached_property
    def gains(self) -> dict[int, float]:
        """Reward after training less that before of each validation video that has both, by its number."""
        pairs = {number: (entry["reward"], self.before[number]["reward"]) for number, entry in self.after.items()}
        return {number: pair[0] - pair[1] for number, pair in pairs.items() if None not in pair}

    @cached_property
    def gain(self) -> Interval | None:
        """The mean gain and its interval over the prompts; None without a before and after."""
        means = by_prompt([self.after[number] for number in self.gains], lambda entry: self.gains[entry["number"]])
        return t_interval(np.array([[*means.values()]])) if means else None

    @property
    def verdict(self) -> str:
        """``suspect``, ``better``, ``worse``, ``unclear``, or ``none`` where there is no before and after."""
        if self.gain is None:
            return "none"
        told = "unclear" if not self.gain.excludes_zero else "better" if self.gain.mean > 0 else "worse"
        return "suspect" if self.hacking else told


def read_run(folder: Path) -> Run:
    """The run in a folder. Raises ValueError where there is none, or where its records are broken."""
    config, path, samples = load_config(folder / "config.yaml"), folder / "metrics.jsonl", folder / SAMPLES
    environment = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["environment"]
    lines = [json.loads(text) for _, text in whole_lines(path)] if path.is_file() else []
    history: list[ValidationStats] = []
    if newest := max(samples.glob(f"[0-9]*/{MEASURES_FILE}"), default=None):
        made_with = parse_json(newest.read_text(encoding="utf-8"))["made_with"]
        history = read_history(samples, made_with, before=int(newest.parent.name) + 1)
    before = _scores(samples / "000000") if history and history[0].iteration == 0 else {}
    after = _scores(newest.parent) if len(history) > 1 and before else {}
    base, threshold = rule.base_stats(history) if after else None, config.record.hacking_threshold
    found = rule.find_shifts(history, threshold) if base else []
    lacking = [folder / ROLLOUTS / f"{line['iteration']:06d}" for line in lines if line["reward/missing"]]
    entries = [entry for scores in [*map(_scores, lacking), before, after] for entry in scores.values()]
    return Run(
        config,
        environment,
        make_plan(config, environment["processes"]).rollouts,
        lines,
        (np.cumsum([line["time/iteration"] for line in lines]) / 3600).tolist(),
        history,
        base,
        [rule.all_shifts(base, now, threshold) if base else [] for now in history],
        rule.describe(history, found) if found else "",
        before,
        after,
        Counter(entry["reason"] or "not said" for entry in entries if entry["missing"]),
        [int(path.name) for path in complete(folder)],
    )


def _scores(folder: Path) -> dict[int, dict]:
    """Entries of a scores.json by number, each with the path of its file; none without a record."""
    path = folder / "scores.json"
    entries = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else []
    files = {file.name: str(file) for file in folder.glob("*.mp4")}  # those that are still there
    return {entry["number"]: entry | {"file": files.get(entry["file"])} for entry in entries}
