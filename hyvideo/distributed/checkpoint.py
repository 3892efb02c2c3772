"""Checkpoints: written by all ranks beside the training, visible by one rename, loadable on any number of ranks.

    checkpoints/000010/tensors/     torch.distributed.checkpoint: policy.*, optimizer.*, anchor.*, average.*
    checkpoints/000010/model.json   the transformer's configuration
    checkpoints/000010/lora/        of a LoRA run: the adapter as diffusers reads it
    checkpoints/000010/state.json   counters, anchor's age, adaptive coefficient, settings
    checkpoints/000010/manifest.json   files, sizes and hashes of all of that
    checkpoints/latest              name of the newest complete one

The anchor is there only if it differs from the policy. Random state is not stored: it is derived from the seed.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor

from hyvideo.data.outside import parse_json, shown
from hyvideo.distributed import manifest
from hyvideo.distributed.checkpoint_reader import SafeReader, read_metadata, read_shapes, single_process
from hyvideo.distributed.mesh import Mesh

FOLDER = "checkpoints"
LATEST, AUTO = "latest", "auto"
TENSORS = "tensors"


class CheckpointWriter:
    """Writes the checkpoints of a run. Every rank calls `save`, with its shards.

    Args:
        keep: Checkpoints that stay; 0 keeps all.
        keep_every: Those of every so many iterations stay too.
        is_asynchronous: Write in a thread, from a copy on the CPU, while training goes on.
        timeout: Seconds that ranks wait for each other.
    """

    def __init__(
        self,
        output_dir: Path,
        mesh: Mesh,
        *,
        keep: int,
        is_asynchronous: bool,
        keep_every: int = 0,
        timeout: float = 1800.0,
    ):
        self.output_dir, self.mesh, self.keep, self.keep_every = output_dir, mesh, keep, keep_every
        self.last_failed = False  # claims that the newest one could not be written
        self.is_asynchronous = is_asynchronous
        # Of its own: the thread's messages must not mix with those of the training.
        limit = timedelta(seconds=timeout)
        self._group = dist.new_group(backend="gloo", timeout=limit) if mesh.world_size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None

    def save(
        self,
        iteration: int,
        tensors: Mapping[str, Tensor],
        state: dict,
        files: Callable[[Path], None] = lambda folder: None,
    ) -> Path:
        """Begins to write the checkpoint of ``iteration``, after the one before. A failure is told, and is no end.

        Args:
            state: JSON: counters and small values.
            files: Writes what else belongs to it into the folder; called on the main rank.
        """
        self.wait()
        copied = {name: tensor.detach().to("cpu", copy=self.is_asynchronous) for name, tensor in tensors.items()}
        target = self.output_dir / FOLDER / name_of(iteration)
        self._pending = self._thread.submit(self._write, target, copied, json.dumps(state, indent=2), files)
        if not self.is_asynchronous:
            self.wait()
        return target

    def check(self) -> None:
        """Tells what writing has met so far, without waiting: not at the next checkpoint, which may be hours away."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Until what was begun is written and visible, or has failed: those before it stay, and training goes on."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self.last_failed = False
        try:
            pending.result()
        except (OSError, dcp.api.CheckpointException, RuntimeError) as error:
            self.last_failed = True
            reason = " ".join(str(error).split())[-500:]
            print(f"\nCHECKPOINT NOT WRITTEN ({reason}); earlier ones are kept, training goes on", file=sys.stderr)

    def _write(self, target: Path, tensors: dict[str, Tensor], state: str, files: Callable[[Path], None]) -> None:
        aside = target.with_name(f".{target.name}.partial")
        try:
            self._write_and_show(aside, target, tensors, state, files)
        except (OSError, dcp.api.CheckpointException, RuntimeError):
            if self.mesh.is_main:  # what is there of it must not fill a full disk
                shutil.rmtree(aside, ignore_errors=True)
            raise

    def _write_and_show(
        self, aside: Path, target: Path, tensors: dict[str, Tensor], state: str, files: Callable[[Path], None]
    ) -> None:
        with self._told_to_all():  # no rank goes on before the folder is there
            if self.mesh.is_main:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        with single_process() if self._group is None else nullcontext():
            dcp.save(
                tensors,
                # All is on the CPU: without copies ahead the library asks for no stream, which in this thread would be
                # one of the first GPU, with memory of every process of the node on it.
                storage_writer=dcp.FileSystemWriter(aside / TENSORS, per_thread_copy_ahead=0),
                process_group=self._group,
                no_dist=self._group is None,
            )
        with self._told_to_all():
            if self.mesh.is_main:
                _check_files(aside / TENSORS)
                files(aside)
                (aside / "state.json").write_text(state)
        hashed: dict[str, dict] = {}
        with self._told_to_all():  # by itself: a rank that fails here would miss the exchange that follows
            hashed = manifest.hash_share(aside, self.mesh)
        listed = manifest.merge(hashed, self.mesh, self._group)
        with self._told_to_all():
            if self.mesh.is_main:
                manifest.write(aside, listed)
                self._show(aside, target)

    @contextmanager
    def _told_to_all(self) -> Iterator[None]:
        """What goes wrong on one rank goes wrong on all, so that none waits for the others."""
        problem = None
        try:
            yield
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            problem = str(error)
        everyone = [problem]
        if self._group is not None:
            everyone = [None] * self.mesh.world_size
            dist.all_gather_object(everyone, problem, group=self._group)
        if problems := [one for one in everyone if one]:
            raise RuntimeError(problems[0])

    def _show(self, aside: Path, target: Path) -> None:
        """Makes a checkpoint that is whole visible, and removes those that are too many."""
        if target.exists():
            _remove(target)
        os.rename(aside, target)
        _point_latest_at(target.parent, target.name)
        others = [path for path in complete(self.output_dir) if path != target and not self._stays(path)]
        for old in others[: max(0, len(others) - (self.keep - 1))] if self.keep else []:
            _remove(old)

    def _stays(self, folder: Path) -> bool:
        return self.keep_every > 0 and int(folder.name) % self.keep_every == 0


def read_state(folder: Path, needed: Mapping[str, type] | None = None) -> dict:
    """Counters and small values of a checkpoint. Raises ValueError where they are missing or broken.

    Args:
        needed: What must be among them, and its type.
    """
    try:
        state = parse_json((folder / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is not a complete checkpoint: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{folder} is not a complete checkpoint: state.json must hold an object, got {shown(state)}")
    for name, kind in (needed or {}).items():
        if type(state.get(name)) is not kind:
            raise ValueError(
                f"{folder} is not a complete checkpoint: {name} in state.json must be of type {kind.__name__}, got "
                f"{shown(state.get(name), 60)}"
            )
    return state


def load_tensors(folder: Path, targets: dict[str, Tensor], mesh: Mesh | None = None) -> None:
    """Fills ``targets``, sharded in whatever way, with the tensors of those names. With several ranks all must call.

    Raises: ValueError for a name or a shape that the checkpoint has not, and for files that cannot be read.
    """
    shapes = read_shapes(folder / TENSORS)
    for name, target in targets.items():
        if name not in shapes:
            raise ValueError(f"checkpoint {folder} has no tensor {name}")
        if tuple(target.shape) != shapes[name].shape:
            raise ValueError(f"{name} has shape {tuple(target.shape)}, in checkpoint {folder} {shapes[name].shape}")
    is_alone = mesh is None or mesh.world_size == 1
    try:
        with single_process() if is_alone else nullcontext():
            dcp.load(dict(targets), storage_reader=SafeReader(folder / TENSORS), no_dist=is_alone)
    except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
        raise ValueError(f"checkpoint {folder} cannot be read: {error}") from error


def find(output_dir: Path, wanted: str) -> Path | None:
    """The checkpoint that ``resume_from_checkpoint`` names, or None where ``latest`` finds none yet. Reads no tensors.

    Raises: ValueError for a folder that is not a checkpoint, or not a whole one.
    """
    if wanted in (LATEST, AUTO):
        return next(iter(candidates(output_dir)), None)
    folder = Path(wanted)
    if not (folder / "state.json").is_file():
        raise ValueError(f"resume_from_checkpoint must be `latest`, `auto` or a checkpoint folder, got {wanted!r}")
    if problem := manifest.size_problem(folder):
        raise ValueError(f"checkpoint {wanted} is damaged: {problem}; take an earlier one, or `latest`")
    return folder


def find_undamaged(output_dir: Path, wanted: str, mesh: Mesh) -> Path | None:
    """As `find`, of those whose contents are what was written too; a damaged one is named and passed over.

    All ranks must call.

    Raises: ValueError for a named checkpoint that is damaged, or where all of a run's are.
    """
    if wanted not in (LATEST, AUTO):
        folder = find(output_dir, wanted)
        if problem := manifest.damage(folder, mesh):
            raise ValueError(f"checkpoint {folder} is damaged: {problem}; take an earlier one, or `latest`")
        return folder
    found = everything = candidates(output_dir, damaged_too=True)
    for folder in found:
        problem = manifest.damage(folder, mesh)
        if problem is None:
            return folder
        if mesh.is_main:
            print(f"checkpoint {folder} is damaged and passed over: {problem}", file=sys.stderr)
    if everything:
        raise ValueError(
            f"every checkpoint in {output_dir / FOLDER} is damaged; remove the folder to begin the run again"
        )
    return None


def candidates(output_dir: Path, *, damaged_too: bool = False) -> list[Path]:
    """Checkpoints to go on from, the best first: that which ``latest`` names, then newer before older."""
    found = complete(output_dir)[::-1]
    pointer = output_dir / FOLDER / LATEST
    name = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    in_order = sorted(found, key=lambda path: path.name != name)
    return [path for path in in_order if damaged_too or manifest.size_problem(path) is None]


def drop_after(output_dir: Path, iteration: int) -> None:
    """Removes what a run left after ``iteration``, which is being resumed, and what a kill left half done."""
    for hidden in (output_dir / FOLDER).glob(".[0-9]*"):
        shutil.rmtree(hidden, ignore_errors=True)
    for parent in (FOLDER, "samples", "rollouts"):
        for path in (output_dir / parent).glob("[0-9]*"):
            if path.name.isdigit() and int(path.name) > iteration:
                _remove(path)


def roll_back(output_dir: Path, iteration: int) -> str | None:
    """Points ``latest`` at the newest complete checkpoint of ``iteration`` or before, and gives its name.

    The newer ones stay until a run resumes there. None, and nothing is changed, where there is none so old.
    """
    old = [path for path in complete(output_dir) if int(path.name) <= iteration]
    if not old:
        return None
    _point_latest_at(old[-1].parent, old[-1].name)
    return old[-1].name


def complete(output_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first. What is incomplete has not been renamed, and is not seen.

    Nor is what somebody has put aside under another name, as 000010-good: it is neither taken up nor removed.
    """
    root = output_dir / FOLDER
    return sorted(path for path in root.glob("[0-9]*") if path.name.isdigit() and (path / "state.json").is_file())


def name_of(iteration: int) -> str:
    return f"{iteration:06d}"


def _check_files(tensors: Path) -> None:
    """Raises RuntimeError where what ranks have written is not all here."""
    files = {info.relative_path for info in read_metadata(tensors).storage_data.values()}
    if missing := sorted(name for name in files if not (tensors / name).is_file()):
        raise RuntimeError(
            f"{len(missing)} of {len(files)} files of the checkpoint are not in {tensors}, {missing[0]} among them: "
            "output_dir must be on a file system that all nodes share"
        )


def _remove(folder: Path) -> None:
    """Hides the folder by one rename first: a crash in between must not leave half a checkpoint that looks whole."""
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(folder, hidden)
    shutil.rmtree(hidden)


def _point_latest_at(root: Path, name: str) -> None:
    aside = root / f".{LATEST}.partial"
    aside.write_text(name + "\n")
    os.replace(aside, root / LATEST)
