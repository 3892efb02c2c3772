"""Checkpoints: written by all ranks beside the training, visible by one rename, loadable on any number of ranks.

    checkpoints/000010/tensors/     torch.distributed.checkpoint: policy.*, optimizer.*, anchor.*, average.*
    checkpoints/000010/model.json   the transformer's configuration
    checkpoints/000010/lora/        of a LoRA run: the adapter as diffusers reads it
    checkpoints/000010/state.json   counters, anchor's age, adaptive coefficient, settings
    checkpoints/latest              name of the newest complete one

The anchor is there only if it differs from the policy. Random state is not stored: it is derived from the seed.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.tensor_files import SafeReader, read_shapes, single_process
from hyvideo.plain_text import parse_json, shown

FOLDER = "checkpoints"
LATEST = "latest"
TENSORS = "tensors"


class CheckpointWriter:
    """Writes the checkpoints of a run. Every rank calls `save`, with its shards.

    Args:
        keep: Checkpoints that stay; 0 keeps all.
        is_asynchronous: Write in a thread, from a copy on the CPU, while training goes on.
        timeout: Seconds that ranks wait for each other.
    """

    def __init__(self, output_dir: Path, mesh: Mesh, *, keep: int, is_asynchronous: bool, timeout: float = 1800.0):
        self.output_dir, self.mesh, self.keep = output_dir, mesh, keep
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
        """Begins to write the checkpoint of ``iteration``; waits for the one before, and raises what it met.

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

    def wait(self) -> None:
        """Until what was begun is written and visible."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _write(self, target: Path, tensors: dict[str, Tensor], state: str, files: Callable[[Path], None]) -> None:
        aside = target.with_name(f".{target.name}.partial")
        if self.mesh.is_main:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        self._barrier()
        with single_process() if self._group is None else nullcontext():
            dcp.save(
                tensors,
                storage_writer=dcp.FileSystemWriter(aside / TENSORS),
                process_group=self._group,
                no_dist=self._group is None,
            )
        if self.mesh.is_main:
            files(aside)
            (aside / "state.json").write_text(state)
            if target.exists():
                _remove(target)
            os.rename(aside, target)
            _point_latest_at(target.parent, target.name)
            others = [path for path in complete(self.output_dir) if path != target]
            for old in others[: max(0, len(others) - (self.keep - 1))] if self.keep else []:
                _remove(old)
        self._barrier()

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)


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
    """The checkpoint that ``resume_from_checkpoint`` names, or None where ``latest`` finds none yet.

    Raises: ValueError for a folder that is not a checkpoint.
    """
    if wanted != LATEST:
        if not (Path(wanted) / "state.json").is_file():
            raise ValueError(f"resume_from_checkpoint must be `latest` or a checkpoint folder, got {wanted!r}")
        return Path(wanted)
    found = complete(output_dir)
    pointer = output_dir / FOLDER / LATEST
    named = output_dir / FOLDER / pointer.read_text(errors="replace").strip() if pointer.is_file() else None
    if named in found:
        return named
    return found[-1] if found else None


def drop_after(output_dir: Path, iteration: int) -> None:
    """Removes what a run left after ``iteration``, which is being resumed: it will be made again, differently."""
    for parent in (FOLDER, "samples", "rollouts"):
        for path in (output_dir / parent).glob("[0-9]*"):
            if path.name.isdigit() and int(path.name) > iteration:
                _remove(path)


def complete(output_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first. What is incomplete has not been renamed, and is not seen."""
    root = output_dir / FOLDER
    return sorted(path for path in root.glob("[0-9]*") if (path / "state.json").is_file())


def name_of(iteration: int) -> str:
    return f"{iteration:06d}"


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
