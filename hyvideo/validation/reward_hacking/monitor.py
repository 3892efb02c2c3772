"""Monitor that applies the reward-hacking rule to all recorded validations of a run and can stop
the run.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from hyvideo.distributed.collectives import from_main
from hyvideo.distributed.mesh import Mesh
from hyvideo.files.files import optional, read_text
from hyvideo.files.run_folder import numbered
from hyvideo.records.run_files import or_none, write_json
from hyvideo.validation.reward_hacking import rule
from hyvideo.validation.reward_hacking.rule import Dispersion, MetricShift, ValidationStats

MEASURES_FILE = "measures.json"


class HackingMonitor:
    """Checks each validation for reward hacking, which ends the run with ``action`` stop and at
    least 16 videos.

    Validations with other settings than ``made_with`` are ignored.
    """

    def __init__(
        self,
        action: str,
        threshold: float,
        mesh: Mesh,
        samples: Path,
        made_with: dict,
        *,
        # of the reward's dimensions, for `rule.transfer`
        weights: Mapping[str, float] | None = None,
        warns_of_transfer: bool = False,
    ):
        self.action = action
        self.threshold = threshold
        self.weights = weights or {}
        self.warns_of_transfer = warns_of_transfer
        self.transfer = math.nan  # of the last validation
        self.mesh = mesh
        self.samples = samples
        self.made_with = made_with
        self.marker = samples.parent / rule.MARKER
        self.shifts: list[MetricShift] = []  # of the last validation
        self.reason = ""
        self.ends_run = False  # verdict of the last validation
        self._warned = False  # of a missing validation of the base model

    def check(self, now: ValidationStats) -> float:
        """Return 1 if the validation shows reward hacking, else 0; NaN without a validation of the
        base model.
        """
        own = self._judge(now) if self.mesh.is_main else None
        judgement = from_main(own, self.mesh)
        is_judged, self.shifts, self.reason, self.ends_run, self.transfer = judgement
        return float(bool(self.shifts)) if is_judged else math.nan

    def end(self, saved: Path | None) -> None:
        """Write the marker file and raise RewardHacking with the ``saved`` checkpoint; None if it
        could not be written.

        Called on every rank.
        """
        if self.mesh.is_main:
            note = {
                "reason": self.reason,
                "on_reward_hacking": self.action,
                "departures": [asdict(shift) for shift in self.shifts],
            }
            with optional(rule.MARKER):
                write_json(self.marker, note)
        policy = "the current policy could not be saved; earlier checkpoints are kept"
        if saved:
            policy = f"the current policy was saved in {saved}"
        raise rule.RewardHacking(
            f"{self.reason}; {policy}. See docs/judge_a_run.md#reward-hacking; "
            f"to resume, delete {self.marker} or set --on_reward_hacking warn"
        )

    def _judge(self, now: ValidationStats) -> tuple[bool, list[MetricShift], str, bool, float]:
        with optional(rule.MARKER):
            self.marker.unlink(missing_ok=True)  # the run was resumed
        history = [*read_history(self.samples, self.made_with, before=now.iteration), now]
        shifts = rule.find_shifts(history, self.threshold)
        reason = rule.describe(history, shifts) if shifts else ""
        base = rule.base_stats(history)
        if base is None:
            if not self._warned:
                _warn(
                    f"{self.samples} has no validation of the base model with these settings to "
                    "compare with"
                )
            self._warned = True
            return False, shifts, reason, False, math.nan
        if reason:
            _warn(reason)
        transfer = rule.transfer(history, self.weights)
        if self.warns_of_transfer and transfer < rule.MIN_TRANSFER:
            _warn(
                f"iteration {now.iteration}: what is not trained on sees {transfer:.0%} of the "
                f"reward's gain since the base model, less than {rule.MIN_TRANSFER:.0%}: raise "
                "kl_weight or stop earlier (docs/judge_a_run.md#reward-hacking)"
            )
        ends_run = bool(shifts) and self.action == "stop" and rule.may_stop(base, now)
        return True, shifts, reason, ends_run, transfer


def read_history(samples: Path, made_with: dict, *, before: int) -> list[ValidationStats]:
    """Return the recorded validations of earlier iterations with the same settings, in order."""
    folders = [path for number, path in numbered(samples.parent, samples.name) if number < before]
    validations = [read_validation(path, made_with) for path in folders]
    return [stats for stats in validations if stats is not None]


def read_validation(folder: Path, made_with: dict) -> ValidationStats | None:
    """Return a recorded validation, NaN for missing values, or None if unreadable or made with
    other settings.
    """
    path = folder / MEASURES_FILE
    try:
        recorded = json.loads(read_text(path))
        pairs = recorded["spreads"].items()
        spreads = {name: Dispersion(float(std), int(count)) for name, (std, count) in pairs}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        _warn(f"{path} cannot be read ({error}): the validation is treated as missing")
        return None
    if recorded["made_with"] != made_with:
        return None
    means = {}
    for name, value in recorded.items():
        if value is None:
            means[name] = math.nan
        elif isinstance(value, (int, float)):
            means[name] = value
    return ValidationStats(int(folder.name), means, spreads)


def write_validation(
    folder: Path, stats: ValidationStats, shifts: Sequence[MetricShift], made_with: dict
) -> None:
    """Write measures.json: means, spreads as [std, count], shifts, and the settings of the
    validation.
    """
    means = {name: or_none(value) for name, value in stats.means.items()}
    others = {
        "spreads": stats.spreads,
        "hacking": [asdict(shift) for shift in shifts],
        "made_with": made_with,
    }
    write_json(folder / MEASURES_FILE, means | others)


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
