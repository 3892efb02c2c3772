"""Where a run starts: with which checkpoint, as which run, in a folder with which results."""

import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from hyvideo.checkpoints.format import (
    all_in,
    keep_corrupted,
    newest_of_run,
    read_state,
    run_of,
)
from hyvideo.checkpoints.loading import corruption
from hyvideo.checkpoints.state import State
from hyvideo.distributed.collectives import from_main, raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.files import run_folder
from hyvideo.files.run_folder import CHECKPOINTS, METRICS, RunRecord
from hyvideo.files.text import quote
from hyvideo.records.metrics_file import complete_lines
from hyvideo.settings.config import RESUME_WORDS


@dataclass(frozen=True)
class Start:
    """What a run starts from, the same on all ranks."""

    run: str  # identity
    record: RunRecord | None  # of the run that the folder holds
    checkpoint: Path | None  # None: from the base model
    state: State | None  # of the checkpoint
    recorded: frozenset[int]  # iterations with a line in metrics.jsonl


def find_start(output_dir: Path, resume_from: str, mesh: Mesh) -> Start:
    """Return what a run in ``output_dir`` starts from: the newest complete checkpoint, the one that
    ``resume_from`` names, or none. Collective.

    A corrupted checkpoint is renamed and kept, if an earlier one is complete. Raises ValueError if
    results would be lost or mixed, and OSError for a checkpoint that cannot be read.
    """
    record = None
    candidates: list[Path] = []
    with raise_on_all_ranks(mesh, errors=(ValueError, OSError)):
        if mesh.is_main:
            record = run_folder.read_record(output_dir)
            candidates = _candidates(output_dir, resume_from, record)
    candidates = from_main(candidates, mesh)
    corrupted: list[Path] = []
    checkpoint = None
    for path in candidates:
        problem = corruption(path, mesh)
        if problem is None:
            checkpoint = path
            break
        corrupted.append(path)
        if mesh.is_main:
            print(f"checkpoint {path} is corrupted: {problem}", file=sys.stderr)
    if corrupted and checkpoint is None:
        raise ValueError(
            f"no checkpoint can be used, all are corrupted and kept: {', '.join(map(str, corrupted))}; "
            "restore one from a copy, or start over in another output_dir"
        )
    start = None
    with raise_on_all_ranks(mesh, errors=(ValueError, OSError)):
        if mesh.is_main:
            for path in corrupted:
                keep_corrupted(path)
            start = Start(
                run=record.run if record else uuid.uuid4().hex[:16],
                record=record,
                checkpoint=checkpoint,
                state=State(**read_state(checkpoint)) if checkpoint else None,
                recorded=_recorded_iterations(output_dir / METRICS),
            )
    return from_main(start, mesh)


def _recorded_iterations(metrics: Path) -> frozenset[int]:
    if not metrics.exists():
        return frozenset()
    return frozenset(iteration for iteration, _ in complete_lines(metrics))


def _candidates(output_dir: Path, resume_from: str, record: RunRecord | None) -> list[Path]:
    """Return the checkpoints to start from, the best first; none for the base model."""
    named = None
    if resume_from not in RESUME_WORDS:
        named = newest_of_run(Path(resume_from))
    if record is None:
        found = run_folder.results_in(output_dir)
        if found:
            raise ValueError(
                f"output_dir {quote(output_dir)} has results ({', '.join(found)}) without the "
                f"{run_folder.RECORD} of their run; choose another output_dir, where "
                "resume_from_checkpoint may name a checkpoint of this one"
            )
        return [named] if named else []
    own = all_in(output_dir)[::-1]
    if named and run_of(named) == output_dir.resolve():
        return [named]
    if named and record.started_from != str(named):
        raise ValueError(
            f"output_dir {quote(output_dir)} has another run than resume_from_checkpoint "
            f"{quote(named)}; choose a new output_dir"
        )
    if record.has_checkpoint and not own:
        raise ValueError(
            f"output_dir {quote(output_dir)} has a run whose {CHECKPOINTS} are missing; restore "
            "them, for example by mounting their disk, or choose another output_dir"
        )
    if own:
        return own
    began_with = named or record.started_from  # it has no checkpoint of its own yet
    return [Path(began_with)] if began_with else []
