"""The watch for reward hacking over a run: measures of the videos of all ranks, their history, and what is done.

The history is read from samples/*/measures.json by the main rank, so a resumed run has it, and what the main rank finds
is what all ranks act on.
"""

import json
import math
import statistics
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from hyvideo.config.sections import RecordSettings
from hyvideo.distributed import checkpoint
from hyvideo.distributed.collectives import from_main, merge_rows, union_of_names
from hyvideo.distributed.mesh import Mesh
from hyvideo.evaluation.reward_hacking.held_out_metrics import NAMES, THUMBNAIL, diversity, measure_video, thumbnail
from hyvideo.evaluation.reward_hacking.rule import (
    MARKER,
    Dispersion,
    MetricShift,
    RewardHacking,
    ValidationStats,
    base_of,
    departures,
    describe,
    last_clean,
)
from hyvideo.models.reward_models.async_scorer import AsyncScorer
from hyvideo.models.reward_models.rewards import Reward
from hyvideo.records.run_files import write_json


def measure_all(
    videos: Mapping[int, Tensor | None],
    rewards: Mapping[int, Reward],
    prompts: Sequence[str],
    groups: Sequence[Hashable],
    judge: AsyncScorer,
    mesh: Mesh,
) -> tuple[dict[str, float], dict[str, Dispersion]]:
    """Means and spreads of everything that is measured of single videos and not rewarded, over those of all ranks.

    Args:
        videos: Those of this rank by number; None could not be decoded.
        rewards: Of the same videos.
        prompts: Of the videos of all ranks, by number.
        groups: Of the same: which belong to one prompt.
    """
    seen = {row: video for row, video in videos.items() if video is not None}
    said = dict(zip(seen, judge.held_out_each(list(seen.values()), [prompts[row] for row in seen])))
    measured = {
        row: {f"held_out/{name}": value for name, value in zip(NAMES, measure_video(video))}
        | said[row]
        | _without_weight(rewards[row], judge.weights)
        for row, video in seen.items()
    }
    names = union_of_names((name for one in measured.values() for name in one), mesh)
    own = {
        row: [*(one.get(name, math.nan) for name in names), *thumbnail(seen[row]).tolist()]
        for row, one in measured.items()
    }
    width = len(names) + 3 * math.prod(THUMBNAIL)
    table = merge_rows(own, len(prompts), width, mesh)
    columns = dict(zip(names, table[:, : len(names)].T.tolist()))
    columns["held_out/diversity"] = diversity(table[:, len(names) :], groups).tolist()
    finite = {name: [value for value in column if math.isfinite(value)] for name, column in columns.items()}
    finite = {name: values for name, values in finite.items() if values}
    spreads = {name: Dispersion(statistics.pstdev(values), len(values)) for name, values in finite.items()}
    return {name: statistics.fmean(values) for name, values in finite.items()}, spreads


def _without_weight(reward: Reward, weights: Mapping[str, float]) -> dict[str, float]:
    """The scores that the reward does not count. ``Overall`` is a sum that it may count parts of."""
    others = {name: score for name, score in reward.scores.items() if not weights.get(name) and name != "Overall"}
    return {name: float(score) for name, score in others.items() if isinstance(score, (int, float))}


class HackingWatch:
    """Judges every validation of a run, and ends the run if the settings say so.

    Args:
        made_with: What the videos are made with: validations of other prompts or steps are no history.
    """

    def __init__(self, settings: RecordSettings, mesh: Mesh, samples: Path, made_with: dict):
        self.action, self.threshold = settings.on_reward_hacking, settings.hacking_threshold
        self.mesh, self.samples, self.made_with = mesh, samples, made_with
        self.marker = Path(settings.output_dir) / MARKER
        self.found: list[MetricShift] = []  # by the last look
        self.reason, self.clean_iteration = "", None

    def look(self, now: ValidationStats) -> float:
        """Judges a validation against those before it; 1 if it shows reward hacking, else 0, NaN without a base."""
        verdict = from_main(self._judge(now) if self.mesh.is_main else None, self.mesh)
        is_judged, self.found, self.reason, self.clean_iteration = verdict
        return float(bool(self.found)) if is_judged else math.nan

    @property
    def ends_run(self) -> bool:
        return bool(self.found) and self.action != "warn"

    def end(self, saved: Path | None = None) -> None:
        """Leaves a note, for rollback points ``latest`` back, and raises RewardHacking; every rank calls it.

        Args:
            saved: The checkpoint that ``stop`` has written.
        """
        raise RewardHacking(from_main(self._leave_note(saved) if self.mesh.is_main else None, self.mesh))

    def _judge(self, now: ValidationStats) -> tuple[bool, list[MetricShift], str, int | None]:
        self.marker.unlink(missing_ok=True)  # the run went on
        history = [*read_history(self.samples, self.made_with, before=now.iteration), now]
        found = departures(history, self.threshold)
        reason = describe(history, found) if found else ""
        has_base = base_of(history) is not None
        no_base = f"{self.samples} has no validation of the base policy made as this one: reward hacking cannot be told"
        warning = reason or ("" if has_base else no_base)
        if warning:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        return has_base, found, reason, last_clean(history, self.threshold)

    def _leave_note(self, saved: Path | None) -> str:
        note = {"reason": self.reason, "on_reward_hacking": self.action, "departures": [*map(asdict, self.found)]}
        if self.action == "rollback":
            kept = checkpoint.roll_back(self.marker.parent, self.clean_iteration)
            done = f"`latest` is now {kept}, of the last validation without it or before"
            if kept is None:
                done = (
                    f"no checkpoint is as old as the last validation without it ({self.clean_iteration}): start again"
                )
        else:
            done = f"the policy as it is was saved in {saved}"
        write_json(self.marker, note)
        return (
            f"{self.reason}; {done}. docs/reward_hacking.md says what to do; to go on, delete {self.marker} or take "
            "--on_reward_hacking warn"
        )


def read_history(samples: Path, made_with: dict, *, before: int) -> list[ValidationStats]:
    """The recorded validations of earlier iterations that were made alike, in order."""
    folders = sorted(path for path in samples.glob("[0-9]*") if path.name.isdigit() and int(path.name) < before)
    return [read_seen(path) for path in folders if is_made_with(path, made_with)]


def is_made_with(folder: Path, made_with: dict) -> bool:
    """Claims that a validation is recorded there, and was made alike."""
    path = folder / "measures.json"
    return path.is_file() and json.loads(path.read_text()).get("made_with", made_with) == made_with


def read_seen(folder: Path) -> ValidationStats:
    recorded = json.loads((folder / "measures.json").read_text())
    spreads = {name: Dispersion(*pair) for name, pair in recorded.get("spreads", {}).items()}
    return ValidationStats(int(folder.name), numbers_of(recorded), spreads)


def numbers_of(recorded: dict) -> dict[str, float]:
    """The measures of a measures.json; NaN where nothing could be measured."""
    numbers = {name: value for name, value in recorded.items() if value is None or isinstance(value, (int, float))}
    return {name: math.nan if value is None else value for name, value in numbers.items()}


def record(folder: Path, seen: ValidationStats, found: Sequence[MetricShift], made_with: dict) -> None:
    """Writes measures.json: the means, the spreads as [std, count], the departures, and how the videos were made."""
    means = {name: value if math.isfinite(value) else None for name, value in seen.means.items()}
    others = {"spreads": seen.spreads, "hacking": [*map(asdict, found)], "made_with": made_with}
    write_json(folder / "measures.json", means | others)
