"""Finding, checking and loading checkpoints, on any number of ranks.

    checkpoints/000010/tensors/     torch.distributed.checkpoint: policy.*, optimizer.*, anchor.*, average.* (EMA)
    checkpoints/000010/model.json   configuration of the transformer
    checkpoints/000010/lora/        LoRA runs: the adapter in diffusers format
    checkpoints/000010/state.json   counters, age of the anchor, KL coefficient, settings
    checkpoints/000010/manifest.json   names, sizes and hashes of these files
    checkpoints/latest              name of the newest complete checkpoint

The anchor is stored only if it differs from the policy. Random state is derived from the seed and not stored.
"""

import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hyvideo.data.outside import parse_json, sync
from hyvideo.distributed import manifest
from hyvideo.distributed.checkpoint_reader import SafeReader, read_shapes
from hyvideo.distributed.collectives import all_objects, from_main, raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.rank_agreement import name_ranks
from hyvideo.distributed.sharded_tensors import assign_ranks, local_shard, replica_group

FOLDER = "checkpoints"
LATEST, AUTO = "latest", "auto"
TENSORS = "tensors"


def read_state(folder: Path, needed: Mapping[str, type] | None = None) -> dict:
    """Return the values of state.json. Raises ValueError if it is invalid or lacks the ``needed`` names or types."""
    try:
        state = parse_json((folder / "state.json").read_text())
        wrong = [name for name, kind in (needed or {}).items() if type(state[name]) is not kind]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder} is not a complete checkpoint: {error!r} in state.json") from error
    if wrong:
        raise ValueError(f"{folder} is not a complete checkpoint: {', '.join(wrong)} in state.json have the wrong type")
    return state


def load_tensors(folder: Path, targets: dict[str, Tensor], mesh: Mesh | None = None) -> None:
    """Load the tensors of a checkpoint into ``targets``, which may be sharded in any way. Collective.

    Parts that several ranks hold are read once and broadcast. Raises ValueError on every rank if any cannot load a
    tensor.
    """
    mesh = mesh or Mesh(0, 1, 1)
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
    for name, reader in zip(names, readers) if group else ():
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
    """Return the checkpoint to resume; None if `latest` finds none. Raises ValueError if a named one is incomplete."""
    if resume_from in (LATEST, AUTO):
        return next((path for path in candidates(output_dir) if manifest.size_problem(path) is None), None)
    folder = Path(resume_from)
    if not (folder / "state.json").is_file():
        raise ValueError(f"resume_from_checkpoint must be `latest`, `auto` or a checkpoint folder, got {resume_from!r}")
    if problem := manifest.size_problem(folder):
        raise _corrupted(folder, problem)
    return folder


def find_intact(output_dir: Path, resume_from: str, mesh: Mesh, skipped: list[Path] | None = None) -> Path | None:
    """Return the first of `candidates` whose files match its manifest; report others and add them to ``skipped``.

    Collective: the main rank chooses. Raises ValueError if a named checkpoint, or every one, is corrupted.
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
        raise ValueError(f"all checkpoints in {output_dir / FOLDER} are corrupted; delete the folder to start over")
    return None


def require_same_checkpoint(iteration: int, manifest_hash: str, mesh: Mesh) -> None:
    """Raise ValueError on all ranks unless all resume from the same checkpoint. Collective."""
    chosen = all_objects(f"iteration {iteration} with manifest {manifest_hash}", mesh)
    if len(set(chosen)) > 1:
        ranks = {name: name_ranks(rank for rank, choice in enumerate(chosen) if choice == name) for name in chosen}
        raise ValueError(
            f"all ranks must resume one checkpoint, got {'; '.join(f'{name} on {ranks[name]}' for name in ranks)}; "
            "restart when all nodes see the same output_dir"
        )


def _corrupted(folder: Path, problem: str) -> ValueError:
    return ValueError(f"checkpoint {folder} is corrupted: {problem}; resume from an earlier one or from `latest`")


def candidates(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints: the one that ``latest`` names, then the others, newest first."""
    newest_first = complete(output_dir)[::-1]
    pointer = output_dir / FOLDER / LATEST
    name = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    return sorted(newest_first, key=lambda path: path.name != name)


def _restore_replaced(output_dir: Path) -> None:
    """Restore checkpoints that were hidden for a replacement that a killed process did not publish."""
    for hidden in (output_dir / FOLDER).glob(".[0-9]*.replaced"):
        folder = hidden.with_name(hidden.name.split(".")[1])
        if not os.path.lexists(folder) and manifest.size_problem(hidden) is None:
            os.rename(hidden, folder)
            sync(folder.parent)


def remove_after(output_dir: Path, iteration: int, corrupted: Collection[Path] = ()) -> None:
    """Remove partial files and all results after ``iteration``; ``corrupted`` checkpoints are renamed instead."""
    for hidden in (output_dir / FOLDER).glob(".[0-9]*"):
        shutil.rmtree(hidden, ignore_errors=True)
    for partial in (*output_dir.glob(".*.partial"), *(output_dir / FOLDER).glob(".*.partial")):
        # Keep the owner file of another process, and folders in which another process may have files open.
        if not partial.name.startswith(".owner") and not partial.is_dir():
            delete(partial, Path.unlink)
    for parent in (FOLDER, "samples", "rollouts"):
        for path in (output_dir / parent).glob("[0-9]*"):
            if path.name.isdigit() and int(path.name) > iteration:
                delete(path, _keep_corrupted if path in corrupted else remove)


def _keep_corrupted(folder: Path) -> None:
    renamed = folder.rename(folder.with_name(f"{folder.name}-damaged"))
    print(f"corrupted checkpoint {folder} is kept as {renamed.name}; delete it manually", file=sys.stderr)


def delete(path: Path, function: Callable[[Path], object]) -> None:
    """Delete a path with ``function``, such as `discard` or `remove`. A failure is reported and not raised."""
    try:
        function(path)
    except OSError as error:
        print(f"\n{path} NOT DELETED ({error}); training continues", file=sys.stderr, flush=True)


def complete(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first. Renamed ones, such as 000010-good, are excluded."""
    found: list[Path] = []
    with suppress(FileNotFoundError):  # unlike iterdir, glob treats an unreadable folder as empty
        found = list((output_dir / FOLDER).iterdir())
    return sorted(path for path in found if path.name.isdigit() and (path / "state.json").is_file())


def remove(folder: Path) -> None:
    """Hide a folder, then delete it, so that a crash leaves no partial checkpoint that looks complete."""
    discard(hide(folder))


def hide(folder: Path, suffix: str = "removed") -> Path:
    """Rename a folder to a hidden name, which checkpoint searches ignore."""
    hidden = folder.with_name(f".{folder.name}.{suffix}")
    if os.path.lexists(hidden):
        discard(hidden)
    os.rename(folder, hidden)
    sync(folder.parent)
    return hidden


def discard(folder: Path) -> None:
    """Delete a folder. For a symbolic link, delete only the link, because the user created its target."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)
