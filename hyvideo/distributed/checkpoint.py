"""Checkpoints: found, checked and read, on any number of ranks.

    checkpoints/000010/tensors/     torch.distributed.checkpoint: policy.*, optimizer.*, anchor.*, average.*
    checkpoints/000010/model.json   the transformer's configuration
    checkpoints/000010/lora/        of a LoRA run: the adapter as diffusers reads it
    checkpoints/000010/state.json   counters, anchor's age, adaptive coefficient, settings
    checkpoints/000010/manifest.json   files, sizes and hashes of all of that
    checkpoints/latest              name of the newest complete one

The anchor is there only if it differs from the policy. Random state is not stored: it is derived from the seed.
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
from hyvideo.distributed.collectives import all_objects, failing_together, from_main
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.rank_agreement import name_ranks
from hyvideo.distributed.sharded_tensors import divide, holders, local

FOLDER = "checkpoints"
LATEST, AUTO = "latest", "auto"
TENSORS = "tensors"


def read_state(folder: Path, needed: Mapping[str, type] | None = None) -> dict:
    """Counters and small values of a checkpoint. Raises ValueError where they or the ``needed`` types are not there."""
    try:
        state = parse_json((folder / "state.json").read_text())
        wrong = [name for name, kind in (needed or {}).items() if type(state[name]) is not kind]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder} is not a complete checkpoint: {error!r} in state.json") from error
    if wrong:
        raise ValueError(f"{folder} is not a complete checkpoint: {', '.join(wrong)} in state.json are of another type")
    return state


def load_tensors(folder: Path, targets: dict[str, Tensor], mesh: Mesh | None = None) -> None:
    """Fills ``targets``, sharded in whatever way, with the tensors of those names. With several ranks all must call.

    What several ranks hold alike, as the replicas of a model do, is read once: each of them reads some of the tensors,
    and sends them to the others. Raises ValueError on every rank where, on one, the checkpoint lacks a name or a shape
    or cannot be read.
    """
    mesh = mesh or Mesh(0, 1, 1)
    names = sorted(targets)
    group = holders(targets.values(), mesh)
    readers = divide([targets[name] for name in names], group)
    own = dist.get_rank(group) if group else 0
    with failing_together(mesh):
        check_shapes(folder, targets)
        read = {name: targets[name] for name, reader in zip(names, readers) if reader == own}
        try:
            dcp.load(read, storage_reader=SafeReader(folder / TENSORS), no_dist=True)
        except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
            raise ValueError(f"checkpoint {folder} cannot be read: {error}") from error
    for name, reader in zip(names, readers) if group else ():
        dist.broadcast(local(targets[name]), group=group, group_src=reader)


def check_shapes(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Raises ValueError for a name or a shape that the checkpoint has not; reads descriptions only."""
    shapes = read_shapes(folder / TENSORS)
    for name, target in targets.items():
        if name not in shapes:
            raise ValueError(f"checkpoint {folder} has no tensor {name}")
        shape, stored = tuple(target.shape), tuple(shapes[name].size)
        if shape != stored:
            raise ValueError(f"{name} has shape {shape}, in checkpoint {folder} {stored}")


def find(output_dir: Path, resume_from: str) -> Path | None:
    """The checkpoint that ``resume_from`` names, None where ``latest`` finds none. ValueError for one not whole."""
    if resume_from in (LATEST, AUTO):
        return next((path for path in candidates(output_dir) if manifest.size_problem(path) is None), None)
    folder = Path(resume_from)
    if not (folder / "state.json").is_file():
        raise ValueError(f"resume_from_checkpoint must be `latest`, `auto` or a checkpoint folder, got {resume_from!r}")
    if problem := manifest.size_problem(folder):
        raise _damaged(folder, problem)
    return folder


def find_undamaged(
    output_dir: Path, resume_from: str, mesh: Mesh, passed_over: list[Path] | None = None
) -> Path | None:
    """The checkpoint of `find` whose contents are what was written; a damaged one is named and ``passed_over``.

    The main rank chooses, as a listing of another node may be stale; all ranks must call. Raises ValueError where a
    named checkpoint is damaged, where all of a run's are, or where one cannot be read now.
    """
    is_named, folders = resume_from not in (LATEST, AUTO), []
    with failing_together(mesh, errors=(ValueError, OSError)):
        if mesh.is_main:
            _bring_back(output_dir)
            folders = [find(output_dir, resume_from)] if is_named else candidates(output_dir)
    folders = from_main(folders, mesh)
    for folder in folders:
        problem = manifest.damage(folder, mesh)
        if problem is None:
            return folder
        if is_named:
            raise _damaged(folder, problem)
        if passed_over is not None:
            passed_over.append(folder)
        if mesh.is_main:
            print(f"checkpoint {folder} is damaged and skipped: {problem}", file=sys.stderr)
    if folders:
        raise ValueError(f"every checkpoint in {output_dir / FOLDER} is damaged; remove the folder to begin again")
    return None


def refuse_different(iteration: int, own_hash: str, mesh: Mesh) -> None:
    """Raises ValueError on all ranks, which must all call, where they do not take up one and the same checkpoint."""
    taken = all_objects(f"that of iteration {iteration} with manifest {own_hash}", mesh)
    if len(set(taken)) > 1:
        ranks = {what: name_ranks(rank for rank, other in enumerate(taken) if other == what) for what in taken}
        raise ValueError(
            f"all ranks must go on from one checkpoint, got {'; '.join(f'{what} on {ranks[what]}' for what in ranks)}; "
            "start again when all nodes see the same output_dir"
        )


def _damaged(folder: Path, problem: str) -> ValueError:
    return ValueError(f"checkpoint {folder} is damaged: {problem}; take an earlier one, or `latest`")


def candidates(output_dir: Path) -> list[Path]:
    """Checkpoints to go on from, the best first: that which ``latest`` names, then newer before older."""
    newest_first = complete(output_dir)[::-1]
    pointer = output_dir / FOLDER / LATEST
    name = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    return sorted(newest_first, key=lambda path: path.name != name)


def _bring_back(output_dir: Path) -> None:
    """Shows again a checkpoint that a kill left hidden, before that which replaces it was shown."""
    for hidden in (output_dir / FOLDER).glob(".[0-9]*.replaced"):
        folder = hidden.with_name(hidden.name.split(".")[1])
        if not os.path.lexists(folder) and manifest.size_problem(hidden) is None:
            os.rename(hidden, folder)
            sync(folder.parent)


def drop_after(output_dir: Path, iteration: int, damaged: Collection[Path] = ()) -> None:
    """Removes what a run left half done or after the resumed ``iteration``; ``damaged`` stay as 000004-damaged."""
    for hidden in (output_dir / FOLDER).glob(".[0-9]*"):
        shutil.rmtree(hidden, ignore_errors=True)
    for partial in (*output_dir.glob(".*.partial"), *(output_dir / FOLDER).glob(".*.partial")):
        # Not the heartbeat of another life, nor a folder that stays while a process has files of it open.
        if not partial.name.startswith(".owner") and not partial.is_dir():
            delete(partial, Path.unlink)
    for parent in (FOLDER, "samples", "rollouts"):
        for path in (output_dir / parent).glob("[0-9]*"):
            if path.name.isdigit() and int(path.name) > iteration:
                delete(path, _put_aside if path in damaged else remove)


def _put_aside(folder: Path) -> None:
    aside = folder.rename(folder.with_name(f"{folder.name}-damaged"))
    print(f"checkpoint {folder} is kept as {aside.name}; delete it by hand", file=sys.stderr)


def delete(path: Path, how: Callable[[Path], object]) -> None:
    """Deletes by `discard` or `remove`, or however; a failure is reported, and is no end."""
    try:
        how(path)
    except OSError as error:
        print(f"\n{path} NOT DELETED ({error}); training goes on", file=sys.stderr, flush=True)


def complete(output_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first; neither unfinished ones nor those put aside by hand, as 000010-good."""
    found: list[Path] = []
    with suppress(FileNotFoundError):  # a glob would take a folder that cannot be read for an empty one
        found = list((output_dir / FOLDER).iterdir())
    return sorted(path for path in found if path.name.isdigit() and (path / "state.json").is_file())


def remove(folder: Path) -> None:
    """Removes a folder, hidden by one rename first: a crash in between leaves no half checkpoint that looks whole."""
    discard(hide(folder))


def hide(folder: Path, why: str = "removed") -> Path:
    """Gives a folder the name under which it is not seen."""
    hidden = folder.with_name(f".{folder.name}.{why}")
    if os.path.lexists(hidden):
        discard(hidden)
    os.rename(folder, hidden)
    sync(folder.parent)
    return hidden


def discard(folder: Path) -> None:
    """Deletes a folder; of a link only itself: what it leads to was put there by somebody."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)
