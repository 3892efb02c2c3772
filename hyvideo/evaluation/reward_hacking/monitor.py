"""The watch for reward hacking over a run: the history of its validations, the rule on it, and the end of the run.

The history is read from samples/*/measures.json by the main rank, so a resumed run has it, and all ranks act on what
the main rank finds.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hyvideo.data.outside import parse_json
from hyvideo.distributed.collectives import from_main
from hyvideo.distributed.mesh import Mesh
from hyvideo.evaluation.reward_hacking import rule
from hyvideo.evaluation.reward_hacking.rule import Dispersion, MetricShift, ValidationStats
from hyvideo.records.run_files import write_json

MEASURES_FILE = "measures.json"


class HackingWatch:
    """Judges every validation of a run, and ends the run if ``action`` is ``stop`` and 16 videos or more show it.

    ``threshold`` are the spreads of the base that a measure may move. Validations that were not ``made_with`` the same
    prompts or steps are no history.
    """

    def __init__(self, action: str, threshold: float, mesh: Mesh, samples: Path, made_with: dict):
        self.action, self.threshold = action, threshold
        self.mesh, self.samples, self.made_with = mesh, samples, made_with
        self.marker = samples.parent / rule.MARKER
        self.shifts: list[MetricShift] = []  # of the last validation
        self.reason = ""
        self.ends_run = False  # as of the last validation
        self._told: set[str] = set()  # what is said once

    def look(self, now: ValidationStats) -> float:
        """1 for a validation that shows reward hacking beside those before it, else 0; NaN without a base."""
        judgement = from_main(self._judge(now) if self.mesh.is_main else None, self.mesh)
        is_judged, self.shifts, self.reason, self.ends_run = judgement
        return float(bool(self.shifts)) if is_judged else math.nan

    def end(self, saved: Path) -> None:
        """Leaves a note and raises RewardHacking, which names the checkpoint ``saved``; every rank calls it."""
        if self.mesh.is_main:
            note = {"reason": self.reason, "on_reward_hacking": self.action, "departures": [*map(asdict, self.shifts)]}
            write_json(self.marker, note)
        raise rule.RewardHacking(
            f"{self.reason}; the policy as it is was saved in {saved}. docs/reward_hacking.md says what to do; to go "
            f"on, delete {self.marker} or take --on_reward_hacking warn"
        )

    def _judge(self, now: ValidationStats) -> tuple[bool, list[MetricShift], str, bool]:
        self.marker.unlink(missing_ok=True)  # the run went on
        history = [*read_history(self.samples, self.made_with, before=now.iteration), now]
        shifts = rule.find_shifts(history, self.threshold)
        reason = rule.describe(history, shifts) if shifts else ""
        base = rule.base_stats(history)
        if base is None:
            self._warn_once(
                f"{self.samples} has no validation of the base policy with these settings: hacking cannot be detected"
            )
            return False, shifts, reason, False
        for name, (before, after) in rule.other_sets(base, now).items():
            self._warn_once(f"{name} of {after} videos is not compared with that of the base, which is of {before}")
        stops = self.action == "stop" and rule.may_stop(base, now)
        if self.action == "stop" and not stops:
            few = f"a validation of fewer than {rule.FEWEST_TO_STOP} videos"
            self._warn_once(f"{few} is too small to stop a run: on_reward_hacking stop only warns")
        if reason:
            _warn(reason)
        return True, shifts, reason, bool(shifts) and stops

    def _warn_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            _warn(message)


def read_history(samples: Path, made_with: dict, *, before: int) -> list[ValidationStats]:
    """The recorded validations of earlier iterations that were made alike, in order."""
    folders = sorted(path for path in samples.glob("[0-9]*") if path.name.isdigit() and int(path.name) < before)
    validations = [read_validation(path, made_with) for path in folders]
    return [stats for stats in validations if stats is not None]


def read_validation(folder: Path, made_with: dict) -> ValidationStats | None:
    """Numbers of a recorded validation, NaN where not measured; None without a sound record made alike."""
    path = folder / MEASURES_FILE
    try:
        recorded = parse_json(path.read_text(encoding="utf-8"))
        pairs = recorded.get("spreads", {}).items()
        spreads = {name: Dispersion(float(std), int(count)) for name, (std, count) in pairs}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:  # AttributeError: it is not an object
        _warn(f"{path} cannot be read ({error}): the validation is treated as missing")
        return None
    if recorded.get("made_with", made_with) != made_with:
        return None
    numbers = {name: value for name, value in recorded.items() if value is None or isinstance(value, (int, float))}
    means = {name: math.nan if value is None else value for name, value in numbers.items()}
    return ValidationStats(int(folder.name), means, spreads)


def write_validation(folder: Path, stats: ValidationStats, shifts: Sequence[MetricShift], made_with: dict) -> None:
    """Writes measures.json: the means, the spreads as [std, count], the shifts, and how the videos were made."""
    means = {name: value if math.isfinite(value) else None for name, value in stats.means.items()}
    others = {"spreads": stats.spreads, "hacking": [*map(asdict, shifts)], "made_with": made_with}
    write_json(folder / MEASURES_FILE, means | others)


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
