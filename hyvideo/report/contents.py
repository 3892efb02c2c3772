"""Content of a report, read from the output files of a run. `page` renders it."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hyvideo.checkpoints.format import complete
from hyvideo.data.prompts import are_seen
from hyvideo.files.files import folder_problem, read_json
from hyvideo.files.run_folder import METRICS, ROLLOUTS, SAMPLES, numbered
from hyvideo.files.yaml_files import read_yaml
from hyvideo.records.metrics_file import read_metrics
from hyvideo.records.timeline import TIMELINE_FILE
from hyvideo.report.series import SPIKE, Series, read_series
from hyvideo.settings.command_line import config_of_run
from hyvideo.settings.config import Config
from hyvideo.settings.iteration_plan import num_rollouts
from hyvideo.settings.objectives import label_of
from hyvideo.settings.run_inputs import trained_prompts
from hyvideo.validation import held_out
from hyvideo.validation.held_out import MEASURES_FILE, MetricShift, ValidationStats
from hyvideo.validation.intervals import Interval, t_interval
from hyvideo.validation.scores_file import mean_by_prompt

AUDIT_FILE = "audit.json"  # of scripts.audit
CONFIG_FILE = "config.yaml"  # marks the output_dir of a run
MAX_POINTS = 500  # of a curve
NOTES_FILES = ("notes.txt", "notes.md")  # of the user; a run neither writes nor removes them
MAX_NOTES = 20_000  # characters


@dataclass(frozen=True)
class RunContents:
    """A run, read from its files, and results derived from them."""

    folder: Path
    config: Config
    environment: dict
    objective: str  # its name in words
    rollouts_per_iteration: int
    series: Series
    history: list[ValidationStats]  # validations with the same settings as the newest
    base: ValidationStats | None  # validation of the base model, if there is a later one
    shifts: list[list[MetricShift]]  # of the held-out metrics, by validation
    hacking: str  # description of reward hacking in the last validation; empty if none
    before: dict[int, dict]  # entries of the base model's scores.json, by number of the video
    after: dict[int, dict]  # entries of the newest validation; empty without a later one
    reasons: Counter  # of missing rewards
    checkpoints: list[int]
    timeline: dict | None  # contents of timeline.json
    notes: str  # of the user, from a text file in the folder; empty without one
    audit: list[dict]  # statements of scripts.audit; empty unless it was run

    @property
    def last_iteration(self) -> int:
        if self.series.last or not self.history:
            return self.series.last
        return self.history[-1].iteration

    @property
    def rollouts(self) -> int:
        """Number of rollouts of all iterations."""
        return self.rollouts_per_iteration * self.series.num_iterations

    @cached_property
    def problems(self) -> list[str]:
        """Warnings about the training, as sentences without a period."""
        series = self.series
        found = []
        if series.total("reward/missing"):
            found.append(
                f"{series.total('reward/missing'):,.0f} of {self.rollouts:,} rewards are missing"
            )
        if series.total("update/skipped"):
            found.append(
                f"{series.total('update/skipped'):,.0f} updates were skipped because of NaN or inf"
            )
        if series.spikes:
            found.append(
                f"the gradient norm exceeded {SPIKE:g} times its recent median in "
                f"{len(series.spikes)} iterations, first in iteration {series.spikes[0]}"
            )
        if (
            2 * series.total("advantage/zero_groups") * self.config.rollout.num_generations
            > self.rollouts
        ):
            found.append("more than half of the groups are zero groups: equal rewards, no gradient")
        if series.restarts:
            found.append(f"restarted before iteration {', '.join(map(str, series.restarts))}")
        return found

    @cached_property
    def gains(self) -> dict[int, float]:
        """Reward after minus before training, of each validation video that has both, by number."""
        pairs = {
            number: (entry["reward"], self.before[number]["reward"])
            for number, entry in self.after.items()
        }
        return {number: pair[0] - pair[1] for number, pair in pairs.items() if None not in pair}

    @cached_property
    def gain(self) -> Interval | None:
        """Mean gain with its interval over the prompts; None without both validations."""
        return self.gain_over(self.gains)

    def gain_over(self, numbers: Iterable[int]) -> Interval | None:
        means = mean_by_prompt(
            (self.after[number]["group"], self.gains[number]) for number in numbers
        )
        return t_interval(np.array([list(means.values())])) if means else None

    @cached_property
    def unseen(self) -> list[int]:
        """Videos of ``gains`` whose prompt was not trained on, by number; none if the files of the
        training have moved.
        """
        training = trained_prompts(self.config)
        if not training:
            return []
        seen = are_seen([self.after[number]["prompt"] for number in self.gains], training)
        return [number for number, is_seen in zip(self.gains, seen) if not is_seen]

    def base_spread(self, name: str) -> float | None:
        """Return the standard deviation of a score over the base model's videos; None if there is
        none.
        """
        if self.base and name in self.base.spreads:
            return self.base.spreads[name].std or None
        values = [
            entry[name]
            for entry in self.before.values()
            if isinstance(entry.get(name), int | float)
        ]
        if not values:
            return None
        return float(np.std(values)) or None  # a spread of 0 is no unit

    @property
    def verdict(self) -> str:
        """``suspect``, ``better``, ``worse``, ``unclear``, or ``none`` without both validations."""
        if self.gain is None:
            return "none"
        if self.hacking:
            return "suspect"
        if not self.gain.excludes_zero:
            return "unclear"
        return "better" if self.gain.mean > 0 else "worse"


def read_run(folder: Path, max_points: int = MAX_POINTS) -> RunContents:
    """Read the run in a folder, with at most ``max_points`` points in a curve.

    Raises ValueError if there is no run or its records are corrupted.
    """
    problem = folder_problem(folder)
    if problem:
        raise ValueError(f"{folder} must be the output_dir of a run: {problem}")
    config = config_of_run(folder / CONFIG_FILE)
    content = read_yaml(folder / CONFIG_FILE)
    environment = content["environment"]
    metrics = folder / METRICS
    lines = read_metrics(metrics) if metrics.is_file() else []
    history = _read_history(folder / SAMPLES)
    validations = {
        stats.iteration: _scores(folder / SAMPLES / f"{stats.iteration:06d}")
        for stats in (*history[:1], *history[-1:])
    }
    before = validations.get(0, {})
    after: dict[int, dict] = {}
    base = None
    if before and len(history) > 1:
        after = validations[history[-1].iteration]
        base = held_out.base_stats(history)
    threshold = config.validation.hacking_threshold
    verdicts = [held_out.Verdict() for _ in history]
    if base:
        verdicts = [held_out.judge([base, now], threshold) for now in history]
    timeline = folder / TIMELINE_FILE
    audit = folder / AUDIT_FILE
    return RunContents(
        folder=folder,
        config=config,
        environment=environment,
        objective=label_of(content["objective"]),
        rollouts_per_iteration=num_rollouts(config, environment["processes"]),
        series=read_series(lines, max_points),
        history=history,
        base=base,
        shifts=[verdict.shifts for verdict in verdicts],
        hacking=verdicts[-1].reason if verdicts else "",
        before=before,
        after=after,
        reasons=_reasons(folder, lines, validations.values()),
        checkpoints=[int(path.name) for path in complete(folder)],
        timeline=read_json(timeline, "timeline") if timeline.is_file() else None,
        notes=read_notes(folder),
        audit=read_json(audit, "audit")["statements"] if audit.is_file() else [],
    )


def read_notes(folder: Path) -> str:
    """Return the beginning of the user's notes on a run; empty without a file of notes."""
    for name in NOTES_FILES:
        file = folder / name
        if file.is_file():
            return file.read_text(encoding="utf-8", errors="replace")[:MAX_NOTES].strip()
    return ""


def _read_history(samples: Path) -> list[ValidationStats]:
    """Return the validations made with the same settings as the newest."""
    measured = [path / MEASURES_FILE for _, path in numbered(samples.parent, SAMPLES)]
    measured = [path for path in measured if path.is_file()]
    if not measured:
        return []
    newest = measured[-1]
    made_with = read_json(newest, "validation")["made_with"]
    return held_out.read_history(samples, made_with, before=int(newest.parent.name) + 1)


def _reasons(folder: Path, lines: Sequence[dict], validations: Iterable[dict]) -> Counter:
    """Return how many rewards are missing for each reason, in rollouts and validations."""
    incomplete = [
        folder / ROLLOUTS / f"{line['iteration']:06d}"
        for line in lines
        if line.get("reward/missing")
    ]
    parts = [*map(_scores, incomplete), *validations]
    entries = [entry for part in parts for entry in part.values()]
    return Counter(entry["reason"] or "unknown" for entry in entries if entry["missing"])


def _scores(folder: Path) -> dict[int, dict]:
    """Return the entries of a scores.json by number, each with the path of its file, or none
    without the file.
    """
    path = folder / "scores.json"
    entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    files = {file.name: str(file) for file in folder.glob("*.mp4")}  # those not deleted
    return {entry["number"]: entry | {"file": files.get(entry["file"])} for entry in entries}
