"""Start of a run in its output folder: what is in the folder, whose it is, and which identity the
run has.

A folder without results gets a new identity, and a folder with the record `.run` keeps the identity
in it. Runs of earlier versions have no record: a run that resumes from a checkpoint in the folder,
beside config.yaml and metrics.jsonl, adopts the numbered folders that have only files of a run.
Everything else raises ValueError.
"""

import os
from pathlib import Path

from hyvideo.data import run_folder
from hyvideo.data.run_folder import CHECKPOINTS, METRICS, NUMBERED, ROLLOUTS, SAMPLES, RunRecord
from hyvideo.data.text import quote
from hyvideo.distributed.checkpoint_loading import AUTO, LATEST, read_state
from hyvideo.records.metrics_file import complete_lines

_MAX_NAMES = 5  # in a message


def identity(
    output_dir: Path, *, resume_from: str, resumed: Path | None, last_iteration: int
) -> str:
    """Return the identity of the run that starts in ``output_dir``; writes nothing.

    ``resumed`` is the checkpoint that the run resumes from, and ``last_iteration`` the last one
    that it will reach. Raises ValueError if results would be lost, or files that the run has not
    made are in the way.
    """
    _check_kinds(output_dir)
    record = run_folder.read_record(output_dir)
    if resumed is None and (resume_from in (LATEST, AUTO) or (record and record.has_saved)):
        _check_nothing_is_lost(output_dir, record, resumes=resume_from in (LATEST, AUTO))
    is_earlier = record is None and _is_of_earlier_version(output_dir, resumed)
    if record:
        run = record.run
    else:
        run = (_is_in(output_dir, resumed) and run_folder.mark_of(resumed)) or run_folder.new_run()
    in_the_way = []
    if not record and not is_earlier:
        for name in run_folder.FILES:
            is_pointer = name == f"{CHECKPOINTS}/{LATEST}" and _is_in(output_dir, resumed)
            if os.path.lexists(output_dir / name) and not is_pointer:
                in_the_way.append(name)
    # The writer sets aside a checkpoint with a number that it needs, which may be a corrupted one
    # of this run.
    parents = NUMBERED if resumed is None and not record else (SAMPLES, ROLLOUTS)
    first = read_state(resumed, {"iteration": int})["iteration"] + 1 if resumed else 0
    for parent in parents:
        for number, path in run_folder.numbered(output_dir, parent):
            is_own = run_folder.is_marked(path, run) or (is_earlier and _can_be_adopted(path))
            if first <= number <= last_iteration and not is_own:
                in_the_way.append(f"{parent}/{path.name}")
    if in_the_way:
        raise ValueError(
            f"output_dir {quote(output_dir)} has files that this run has not written and would "
            f"replace: {_listed(in_the_way)}; choose another output_dir, or move these files away"
        )
    return run


def begin(output_dir: Path, run: str, *, resumed: Path | None) -> None:
    """Write the identity of the run and, in a folder of an earlier version, the marks of its
    folders.
    """
    if run_folder.read_record(output_dir) is None and _is_of_earlier_version(output_dir, resumed):
        for parent in NUMBERED:
            for _, path in run_folder.numbered(output_dir, parent):
                if _can_be_adopted(path):
                    run_folder.mark(path, path, run)
    run_folder.write_record(output_dir, RunRecord(run, has_saved=resumed is not None))


def _check_kinds(output_dir: Path) -> None:
    """Raise ValueError if a name of the run belongs to something of another kind, such as a link
    without a target.
    """
    for name in (*NUMBERED, "tensorboard"):
        path = output_dir / name
        if path.is_symlink() and not path.exists():
            raise ValueError(
                f"{quote(path)} must be a folder, got a link to {quote(os.readlink(path))}, which "
                "does not exist; mount the disk that has it, or remove the link"
            )
        if os.path.lexists(path) and not path.is_dir():
            raise ValueError(
                f"{quote(path)} must be a folder, got a file; move it away, or choose another "
                "output_dir"
            )
    for name in run_folder.FILES:
        path = output_dir / name
        if os.path.lexists(path) and not path.is_file():
            raise ValueError(
                f"{quote(path)} must be a regular file, got "
                f"{'a folder' if path.is_dir() else 'something else'}; move it away, or choose "
                "another output_dir"
            )


def _check_nothing_is_lost(output_dir: Path, record: RunRecord | None, *, resumes: bool) -> None:
    """Raise ValueError if a run without a checkpoint would start over in a folder with results.

    ``resumes`` says whether the run looks for one.

    A run that has recorded that it never saved starts over: nothing of it can be resumed.
    """
    if record and not record.has_saved:
        return
    found = []
    lines = complete_lines(output_dir / METRICS) if os.path.lexists(output_dir / METRICS) else []
    if lines:
        found.append(f"{METRICS} up to iteration {lines[-1][0]}")
    for parent in NUMBERED:
        for _, path in run_folder.numbered(output_dir, parent):
            if parent == CHECKPOINTS or run_folder.mark_of(path) or _can_be_adopted(path):
                found.append(f"{parent}/{path.name}")
    if found and not resumes:
        raise ValueError(
            f"output_dir {quote(output_dir)} has results of a run that would be replaced; found "
            f"{_listed(found)}. Set resume_from_checkpoint {LATEST} to continue this run, or "
            "choose another output_dir"
        )
    if found:
        raise ValueError(
            f"output_dir {quote(output_dir)} has results, but no checkpoint in {CHECKPOINTS} to "
            f"resume; found {_listed(found)}. Restore the checkpoints, for example by mounting "
            "their disk; or, to start over, choose another output_dir or move these results away"
        )


def _is_of_earlier_version(output_dir: Path, resumed: Path | None) -> bool:
    """Return whether ``resumed`` is a checkpoint of the run in ``output_dir``, which has all files
    of a run.
    """
    has_files = all((output_dir / name).is_file() for name in ("config.yaml", METRICS))
    return has_files and _is_in(output_dir, resumed)


def _is_in(output_dir: Path, resumed: Path | None) -> bool:
    """Return whether ``resumed`` is one of the checkpoints in ``output_dir``."""
    return resumed is not None and resumed.resolve().parent == (output_dir / CHECKPOINTS).resolve()


def _can_be_adopted(folder: Path) -> bool:
    """Return whether a folder has only files with the names that a run writes, at least one, and no
    run's mark.
    """
    if folder.is_symlink() or not folder.is_dir() or run_folder.mark_of(folder):
        return False
    return any(folder.iterdir()) and not run_folder.other_contents(folder)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
