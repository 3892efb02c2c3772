"""Finding, checking and loading checkpoints, on any number of ranks.

    checkpoints/000010/tensors/     torch.distributed.checkpoint: policy.*, optimizer.*, anchor.*, average.* (EMA)
    checkpoints/000010/model.json   configuration of the transformer
    checkpoints/000010/lora/        LoRA runs: the adapter in diffusers format
    checkpoints/000010/state.json   counters, age of the anchor, KL coefficient, settings
    checkpoints/000010/.run         the run that wrote it (`data.run_folder`)
    checkpoints/000010/manifest.json   names, sizes and hashes of these files
    checkpoints/latest              name of the newest complete checkpoint

The anchor is stored only if it differs from the policy. Random state is derived from the seed and
not stored.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hyvideo.data.files import parse_json, sync
from hyvideo.data.run_folder import CHECKPOINTS, LATEST, MARK, numbered
from hyvideo.data.text import quote
from hyvideo.distributed import manifest
from hyvideo.distributed.checkpoint_reader import SafeReader, read_shapes
from hyvideo.distributed.collectives import (
    all_objects,
    from_main,
    name_ranks,
    raise_on_all_ranks,
)
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.sharded_tensors import assign_ranks, local_shard, replica_group

AUTO = "auto"
TENSORS = "tensors"
# any of them shows that a folder is a checkpoint
_PARTS = ("state.json", manifest.NAME, "model.json", TENSORS, MARK)


def read_state(
    folder: Path,
    needed: Mapping[str, object] | None = None,
    optional: Mapping[str, object] | None = None,
) -> dict:
    """Return the values of state.json.

    Raises ValueError if it is invalid, or lacks the ``needed`` names or kinds.

    A kind is ``int`` for a count, ``float`` for a number, another type, ``[kind]`` for a list, a
    tuple of alternatives, or a mapping of the names in a JSON object to their kinds, in which ``*``
    stands for all names. ``optional`` has the kinds of names that may be absent.
    """
    try:
        state = parse_json((folder / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} is not a complete checkpoint: {error!r} in state.json"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(
            f"{folder} is not a complete checkpoint: state.json must contain a JSON object"
        )
    kinds = dict(needed or {})
    kinds |= {name: kind for name, kind in (optional or {}).items() if name in state}
    if absent := [name for name in kinds if name not in state]:
        raise ValueError(
            f"{folder} is not a complete checkpoint: state.json has no {', '.join(absent)}"
        )
    wrong = [name for name, kind in kinds.items() if not _is_kind(state[name], kind)]
    if wrong:
        values = ", ".join(f"{name} {quote(state[name], 60)}" for name in wrong)
        raise ValueError(
            f"{folder} is not a complete checkpoint: state.json has the wrong values {values}; "
            "resume from an earlier checkpoint"
        )
    return state


def _is_kind(value: object, kind: object) -> bool:
    """Return whether a value of state.json is of a kind that `read_state` describes."""
    if kind is int:
        return type(value) is int and value >= 0
    if kind is float:
        return type(value) in (int, float)
    if isinstance(kind, type):
        return type(value) is kind
    if isinstance(kind, list):
        return isinstance(value, list) and all(_is_kind(element, kind[0]) for element in value)
    if isinstance(kind, tuple):
        return any(_is_kind(value, each) for each in kind)
    assert isinstance(kind, Mapping)
    if not isinstance(value, dict):
        return False
    if "*" in kind:
        return all(_is_kind(element, kind["*"]) for element in value.values())
    return all(name in value and _is_kind(value[name], kind[name]) for name in kind)


def load_tensors(folder: Path, targets: dict[str, Tensor], mesh: Mesh | None = None) -> None:
    """Load the tensors of a checkpoint into ``targets``, which may be sharded in any way.

    Collective; without a mesh, this process loads alone. Parts that several ranks hold are read
    once and broadcast. Raises ValueError on every rank if any cannot load a tensor.
    """
    mesh = mesh or Mesh.single()
    names = sorted(targets)
    group = replica_group(targets.values(), mesh)
    readers = assign_ranks([targets[name] for name in names], group)
    group_rank = dist.get_rank(group) if group else 0
    with raise_on_all_ranks(mesh):
        check_shapes(folder, targets)
        read = {name: targets[name] for name, reader in zip(names, readers) if reader == group_rank}
        try:
            dcp.load(read, storage_reader=SafeReader(folder / TENSORS), no_dist=True)
        except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
            raise ValueError(f"checkpoint {folder} cannot be read: {error}") from error
    if group:
        for name, reader in zip(names, readers):
            dist.broadcast(local_shard(targets[name]), group=group, group_src=reader)


def check_shapes(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the checkpoint lacks a name or has another shape. Reads metadata only."""
    shapes = read_shapes(folder / TENSORS)
    for name, target in targets.items():
        if name not in shapes:
            raise ValueError(f"checkpoint {folder} has no tensor {name}")
        shape, stored = tuple(target.shape), tuple(shapes[name].size)
        if shape != stored:
            raise ValueError(f"{name} has shape {shape}, but {stored} in checkpoint {folder}")


def find(output_dir: Path, resume_from: str) -> Path | None:
    """Return the checkpoint to resume; None if `latest` or `auto` finds none.

    Raises ValueError if a named one is incomplete.
    """
    if resume_from in (LATEST, AUTO):
        return next(
            (path for path in candidates(output_dir) if manifest.size_problem(path) is None), None
        )
    folder = Path(resume_from)
    # not a checkpoint at all; `size_problem` finds incomplete ones
    if not (folder / "state.json").is_file():
        raise ValueError(
            "resume_from_checkpoint must be `latest`, `auto` or a checkpoint folder, got "
            f"{resume_from!r}"
        )
    if problem := manifest.size_problem(folder):
        raise _corrupted(folder, problem)
    return folder


def find_intact(
    output_dir: Path, resume_from: str, mesh: Mesh, skipped: list[Path] | None = None
) -> Path | None:
    """Return the first of `candidates` whose files match its manifest; report others and add them
    to ``skipped``.

    Collective: the main rank chooses. Raises ValueError if a named checkpoint, or every one, is
    corrupted. No checkpoint is deleted: a run that resumes from an earlier one sets the ``skipped``
    ones aside.
    """
    is_named, folders = resume_from not in (LATEST, AUTO), []
    with raise_on_all_ranks(mesh, errors=(ValueError, OSError)):
        if mesh.is_main:
            _restore_replaced(output_dir)
            folders = [find(output_dir, resume_from)] if is_named else candidates(output_dir)
    folders = from_main(folders, mesh)
    for folder in folders:
        problem = manifest.corruption(folder, mesh)
        if problem is None:
            return folder
        if is_named:
            raise _corrupted(folder, problem)
        if skipped is not None:
            skipped.append(folder)
        if mesh.is_main:
            print(f"skipping corrupted checkpoint {folder}: {problem}", file=sys.stderr)
    if folders:
        raise ValueError(
            f"all checkpoints in {output_dir / CHECKPOINTS} are corrupted and kept: "
            f"{', '.join(path.name for path in folders)}; restore one of them from a copy, or "
            "start over in another output_dir"
        )
    return None


def require_same_checkpoint(iteration: int, manifest_hash: str, mesh: Mesh) -> None:
    """Raise ValueError on all ranks unless all resume from the same checkpoint. Collective."""
    chosen = all_objects(f"iteration {iteration} with manifest {manifest_hash}", mesh)
    if len(set(chosen)) > 1:
        ranks = {
            name: name_ranks(rank for rank, choice in enumerate(chosen) if choice == name)
            for name in chosen
        }
        raise ValueError(
            "all ranks must resume one checkpoint, got "
            f"{'; '.join(f'{name} on {ranks[name]}' for name in ranks)}; restart when all nodes "
            "see the same output_dir"
        )


def _corrupted(folder: Path, problem: str) -> ValueError:
    return ValueError(
        f"checkpoint {folder} is corrupted: {problem}; resume from an earlier one or from `latest`"
    )


def candidates(output_dir: Path) -> list[Path]:
    """Return the checkpoints, also corrupted ones: the one that ``latest`` names, then the others,
    newest first.
    """
    found = [path for _, path in numbered(output_dir, CHECKPOINTS) if _is_checkpoint(path)]
    newest_first = found[::-1]
    pointer = output_dir / CHECKPOINTS / LATEST
    name = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    return sorted(newest_first, key=lambda path: path.name != name)


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is, or was, a checkpoint: it has a part of one.

    Raises OSError if it is unreadable.
    """
    for part in _PARTS:
        with suppress(FileNotFoundError, NotADirectoryError):
            (folder / part).lstat()
            return True
    return False


def _restore_replaced(output_dir: Path) -> None:
    """Restore checkpoints that were hidden for a replacement that a killed process did not
    publish.
    """
    for hidden in (output_dir / CHECKPOINTS).glob(".[0-9]*.replaced"):
        folder = hidden.with_name(hidden.name.split(".")[1])
        if not os.path.lexists(folder) and manifest.size_problem(hidden) is None:
            os.rename(hidden, folder)
            sync(folder.parent)


def complete(output_dir: Path) -> list[Path]:
    """Return the checkpoints with a state.json, oldest first.

    Renamed ones, such as 000010-good, are excluded.
    """
    return [
        path for _, path in numbered(output_dir, CHECKPOINTS) if (path / "state.json").is_file()
    ]
