"""Checkpoints are written by all ranks beside the training, and become visible by one rename."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor

from hyvideo.data.outside import replacing, sync
from hyvideo.distributed import manifest
from hyvideo.distributed.checkpoint import FOLDER, LATEST, TENSORS, complete, delete, discard, hide, remove
from hyvideo.distributed.checkpoint_reader import read_metadata
from hyvideo.distributed.collectives import all_objects, failing_together
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.ownership import Ownership

_FAILURES = (OSError, dcp.api.CheckpointException, RuntimeError)


class CheckpointWriter:
    """Writes the checkpoints of a run. Every rank calls `save`, with its shards."""

    def __init__(
        self,
        output_dir: Path,
        mesh: Mesh,
        *,
        keep: int,  # checkpoints that stay; 0 keeps all
        is_asynchronous: bool,  # writes in a thread, from a copy on the CPU, while training goes on
        keep_every: int = 0,  # those of every so many iterations stay too
        timeout: float = 1800.0,  # seconds that ranks wait for each other
        owner: Ownership | None = None,  # says whether the folder is still this life's; without one it is
    ):
        self.output_dir, self.mesh, self.is_asynchronous = output_dir, mesh, is_asynchronous
        self.keep, self.keep_every, self.owner = keep, keep_every, owner
        self.last_failed = False  # claims that the newest one could not be written
        # Of its own: the thread's messages must not mix with those of the training.
        limit = timedelta(seconds=timeout)
        self._group = dist.new_group(backend="gloo", timeout=limit) if mesh.world_size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None

    def save(
        self,
        iteration: int,
        tensors: Mapping[str, Tensor],
        state: dict,  # JSON: counters and small values
        files: Callable[[Path], None] = lambda folder: None,  # writes what else belongs into it; on the main rank
    ) -> Path:
        """Begins to write the checkpoint of ``iteration`` after the one before. A failure is reported and is no end."""
        self.wait()
        copied = {name: tensor.detach().to("cpu", copy=self.is_asynchronous) for name, tensor in tensors.items()}
        target = self.output_dir / FOLDER / f"{iteration:06d}"
        self._pending = self._thread.submit(self._write, target, copied, json.dumps(state, indent=2), files)
        if not self.is_asynchronous:
            self.wait()
        return target

    def check(self) -> None:
        """Reports a failure of writing so far, without waiting: not at the next checkpoint, hours later."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits until what was begun is visible, or has failed: those before it stay, and training goes on."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self.last_failed = False
        try:
            pending.result()
        except _FAILURES as error:
            self.last_failed = True
            reason = " ".join(str(error).split())[-500:]
            if self.mesh.is_main:  # all ranks have the same reason
                print(f"\nCHECKPOINT NOT WRITTEN ({reason}); earlier ones are kept, training goes on", file=sys.stderr)

    def _write(self, target: Path, tensors: dict[str, Tensor], state: str, files: Callable[[Path], None]) -> None:
        life = f".{self.owner.life}" if self.owner else ""
        aside = target.with_name(f".{target.name}{life}.partial")
        try:
            shares = self._write_aside(aside, tensors, state, files)
            with self._failing_together():
                if self.mesh.is_main:
                    manifest.write(aside, shares)
                    self._show(aside, target)
        except _FAILURES:
            if self.mesh.is_main:  # what is there of it must not fill a full disk
                shutil.rmtree(aside, ignore_errors=True)
            raise

    def _write_aside(
        self, aside: Path, tensors: dict[str, Tensor], state: str, files: Callable[[Path], None]
    ) -> list[dict[str, dict]]:
        """Writes all but the manifest, and gives every rank's share of that."""
        with self._failing_together():  # no rank goes on before the folder is there
            if self.mesh.is_main:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        dcp.save(
            tensors,
            # All is on the CPU: without copies ahead the library asks for no stream, which in this thread would be
            # one of the first GPU, with memory of every process of the node on it.
            storage_writer=dcp.FileSystemWriter(aside / TENSORS, per_thread_copy_ahead=0),
            process_group=self._group,
            no_dist=self._group is None,
        )
        with self._failing_together():
            if self.mesh.is_main:
                _check_files(aside / TENSORS)
                files(aside)
                (aside / "state.json").write_text(state)
        hashed: dict[str, dict] = {}
        with self._failing_together():  # by itself: a rank that fails here would miss the exchange that follows
            hashed = manifest.hash_share(aside, self.mesh)
        return all_objects(hashed, self.mesh, self._group)

    def _failing_together(self) -> AbstractContextManager:
        return failing_together(self.mesh, self._group, (RuntimeError, OSError, ValueError, SafetensorError))

    def _show(self, aside: Path, target: Path) -> None:
        """Makes a checkpoint that is whole visible, and removes those that are too many."""
        for path in (*aside.rglob("*"), aside):
            sync(path)
        self._refuse_superseded()
        replaced = [hide(target, "replaced")] if os.path.lexists(target) else []
        os.rename(aside, target)
        sync(target.parent)
        sync(self.output_dir)  # in which the folder of checkpoints may be new
        self._refuse_superseded()
        with replacing(target.parent / LATEST) as pointer:
            pointer.write_text(target.name + "\n")
        too_many: list[Path] = []
        if self.keep:
            every = self.keep_every
            others = [p for p in complete(self.output_dir) if p != target and not (every and int(p.name) % every == 0)]
            too_many = others[: max(0, len(others) - (self.keep - 1))]
        self._refuse_superseded()
        for how, folders in ((discard, replaced), (remove, too_many)):
            for old in folders:
                delete(old, how)

    def _refuse_superseded(self) -> None:
        """Raises RuntimeError where a later life has the folder: what it goes on from must stay as it is."""
        if self.owner and not self.owner.holds():
            raise RuntimeError(f"another process of the run has taken over {self.output_dir}")


def _check_files(tensors: Path) -> None:
    """Raises RuntimeError where what ranks have written is not all here."""
    files = {info.relative_path for info in read_metadata(tensors).storage_data.values()}
    if missing := sorted(name for name in files if not (tensors / name).is_file()):
        raise RuntimeError(
            f"{len(missing)} of {len(files)} files of the checkpoint are not in {tensors}, {missing[0]} among them: "
            "output_dir must be on a file system that all nodes share"
        )
