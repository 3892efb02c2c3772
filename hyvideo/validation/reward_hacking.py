"""Reward hacking in a run: what a validation says, its warnings, and the end of the run.

`held_out` has the rule.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from hyvideo.checks.without_effect import MIN_VIDEOS_TO_STOP
from hyvideo.distributed.collectives import from_main
from hyvideo.distributed.mesh import Mesh
from hyvideo.files.files import optional
from hyvideo.files.run_folder import STOPPED_FOR_HACKING
from hyvideo.records.run_files import write_json
from hyvideo.settings.sections import ValidationSettings
from hyvideo.validation.held_out import (
    MIN_TRANSFER,
    REWARD,
    ValidationStats,
    Verdict,
    base_stats,
    count_of,
    judge,
    read_history,
    warn,
)


class RewardHacking(RuntimeError):
    """Raised to stop a run whose reward rose while a held-out metric degraded."""


def after_validation(
    now: ValidationStats,
    samples: Path,
    made_with: Mapping[str, object],
    validation: ValidationSettings,
    mesh: Mesh,
    *,
    weights: Mapping[str, float],  # of the reward's dimensions
    warns_of_transfer: bool = False,
) -> Verdict:
    """Return the verdict on a validation, after warning of what is wrong. Collective.

    It is compared with the earlier ones in the folder ``samples`` that were made with the same
    settings. With ``on_reward_hacking`` stop and enough videos, hacking ends the run.
    """
    if not mesh.is_main:
        return from_main(Verdict(), mesh)
    with optional(STOPPED_FOR_HACKING):
        (samples.parent / STOPPED_FOR_HACKING).unlink(missing_ok=True)  # the run was resumed
    history = [*read_history(samples, made_with, before=now.iteration), now]
    verdict = judge(history, validation.hacking_threshold, weights)
    if not verdict.has_base and len(history) == 1:
        warn(f"{samples} has no validation of the base model with these settings to compare with")
    if verdict.reason:
        warn(verdict.reason)
    if warns_of_transfer and verdict.transfer < MIN_TRANSFER:
        warn(
            f"iteration {now.iteration}: what is not trained on sees {verdict.transfer:.0%} of the "
            f"reward's gain since the base model, less than {MIN_TRANSFER:.0%}: raise "
            "kl_weight or stop earlier (docs/judge_a_run.md#reward-hacking)"
        )
    if verdict.departures and validation.on_reward_hacking == "stop":
        fewest = min(count_of(REWARD, base_stats(history)), count_of(REWARD, now))
        verdict = replace(verdict, ends_run=fewest >= MIN_VIDEOS_TO_STOP)
    return from_main(verdict, mesh)


def stop(verdict: Verdict, output_dir: Path, saved: Path | None, mesh: Mesh) -> None:
    """Write why the run stops and raise RewardHacking with the ``saved`` checkpoint; None if it
    could not be written.
    """
    marker = output_dir / STOPPED_FOR_HACKING
    if mesh.is_main:
        note = {
            "reason": verdict.reason,
            "on_reward_hacking": "stop",
            "departures": [asdict(shift) for shift in verdict.departures],
        }
        with optional(STOPPED_FOR_HACKING):
            write_json(marker, note)
    policy = "the current policy could not be saved; earlier checkpoints are kept"
    if saved:
        policy = f"the current policy was saved in {saved}"
    raise RewardHacking(
        f"{verdict.reason}; {policy}. See docs/judge_a_run.md#reward-hacking; "
        f"to resume, delete {marker} or set --on_reward_hacking warn"
    )
