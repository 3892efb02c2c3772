"""Asynchronous checkpoint writing by all ranks; a checkpoint becomes visible by one rename."""

import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hyvideo.data import run_folder
from hyvideo.data.files import publish, sync
from hyvideo.data.run_folder import CHECKPOINTS, LATEST
from hyvideo.distributed import manifest
from hyvideo.distributed.checkpoint_loading import TENSORS, complete
from hyvideo.distributed.checkpoint_reader import read_metadata
from hyvideo.distributed.collectives import all_objects, raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.ownership import Ownership

_FAILURES = (Exception, dcp.api.CheckpointException)  # training continues after all of them


class CheckpointWriter:
    """Writer of a run's checkpoints. Every rank calls `save` with its shards."""

    def __init__(
        self,
        output_dir: Path,
        mesh: Mesh,
        *,
        keep: int,  # number of newest checkpoints to keep; 0 keeps all
        is_asynchronous: bool,  # write in a thread, from a CPU copy, while training continues
        keep_every: int = 0,  # also keep the checkpoints of every N-th iteration
        timeout: float = 1800.0,  # seconds that ranks wait for each other
        owner: Ownership | None = None,  # checked before anything is renamed or deleted
        run: str,  # marks the checkpoints; others are not deleted
    ):
        self.output_dir = output_dir
        self.mesh = mesh
        self.is_asynchronous = is_asynchronous
        self.keep = keep
        self.keep_every = keep_every
        self.owner = owner
        self.run = run
        self.last_failed = False  # whether the newest checkpoint could not be written
        # start and, once it has ended, end of the newest write (`perf_counter`)
        self.spans: list[list[float]] = []
        # A separate group, so that the thread's collectives cannot mix with the collectives of the training.
        limit = timedelta(seconds=timeout)
        self._group = dist.new_group(backend="gloo", timeout=limit) if mesh.world_size > 1 else None
        # named in config/processes.py
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None

    def save(
        self,
        iteration: int,
        tensors: Mapping[str, Tensor],
        state: dict,  # JSON: counters and small values
        # writes additional files; called on the main rank
        files: Callable[[Path], None] = lambda folder: None,
    ) -> Path:
        """Wait for the previous checkpoint, then start writing this one and return its folder.

        Collective.
        """
        self.wait()
        copied = {
            name: tensor.detach().to("cpu", copy=self.is_asynchronous)
            for name, tensor in tensors.items()
        }
        target = self.output_dir / CHECKPOINTS / f"{iteration:06d}"
        self.spans = [[time.perf_counter()]]
        self._pending = self._thread.submit(
            self._write, target, copied, json.dumps(state, indent=2), files
        )
        if not self.is_asynchronous:
            self.wait()
        return target

    def check(self) -> None:
        """Report the failure of a finished write now rather than at the next checkpoint."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the current checkpoint is visible or has failed.

        A failure is reported and not raised.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self.last_failed = False
        try:
            pending.result()
        except _FAILURES as error:
            self.last_failed = True
            reason = " ".join(str(error).split())[-500:]
            if self.mesh.is_main:  # the reason is the same on all ranks
                print(
                    f"\nCHECKPOINT NOT WRITTEN ({reason}); keeping earlier ones, training continues",
                    file=sys.stderr,
                )

    def _write(
        self, target: Path, tensors: dict[str, Tensor], state: str, files: Callable[[Path], None]
    ) -> None:
        token = f".{self.owner.token}" if self.owner else ""
        partial = target.with_name(f".{target.name}{token}.partial")
        try:
            with _warnings_are_no_errors():
                shares = self._write_partial(partial, target, tensors, state, files)
            with self._raise_on_all_ranks():
                if self.mesh.is_main:
                    manifest.write(partial, shares)
                    self._publish(partial, target)
        except _FAILURES:
            if self.mesh.is_main:  # a partial checkpoint must not fill the disk
                shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            self.spans[0].append(time.perf_counter())

    def _write_partial(
        self,
        partial: Path,
        target: Path,
        tensors: dict[str, Tensor],
        state: str,
        files: Callable[[Path], None],
    ) -> list[dict[str, dict]]:
        """Write everything except the manifest and return every rank's share of the manifest."""
        with self._raise_on_all_ranks():  # no rank continues before the folder exists
            if self.mesh.is_main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                run_folder.mark(partial, target, self.run)
        dcp.save(
            tensors,
            # All tensors are on the CPU. With copy-ahead, the library would request a CUDA stream,
            # which in this thread would be on the first GPU, so that every process of the node
            # would allocate memory there.
            storage_writer=dcp.FileSystemWriter(partial / TENSORS, per_thread_copy_ahead=0),
            process_group=self._group,
            no_dist=self._group is None,
        )
        with self._raise_on_all_ranks():
            if self.mesh.is_main:
                _check_files(partial / TENSORS)
                files(partial)
                (partial / "state.json").write_text(state)
        hashed: dict[str, dict] = {}
        # before the next collective, which a rank that fails would miss
        with self._raise_on_all_ranks():
            hashed = manifest.hash_share(partial, self.mesh)
        return all_objects(hashed, self.mesh, self._group)

    def _raise_on_all_ranks(self) -> AbstractContextManager:
        return raise_on_all_ranks(self.mesh, self._group, (RuntimeError, Exception))

    def _publish(self, partial: Path, target: Path) -> None:
        """Make a complete checkpoint visible and delete those beyond ``keep``."""
        for path in (*partial.rglob("*"), partial):
            sync(path)
        self._check_ownership()
        run_folder.record_saved(self.output_dir)
        replaced = []
        if run_folder.is_marked(target, self.run):
            replaced = [run_folder.hide(target, "replaced")]
        elif os.path.lexists(target):
            kept = run_folder.set_aside(target, "-kept")
            print(
                f"\n{target} is not a checkpoint of this run; it is kept as {kept.name}",
                file=sys.stderr,
                flush=True,
            )
        os.rename(partial, target)
        sync(target.parent)
        sync(self.output_dir)  # the checkpoints folder itself may be new
        self._check_ownership()
        with publish(target.parent / LATEST) as pointer:
            pointer.write_text(target.name + "\n")
        excess = self._excess(target) if self.keep else []
        self._check_ownership()
        for folder in replaced:
            run_folder.delete(folder, run_folder.discard)
        for folder in excess:
            run_folder.delete(folder, run_folder.remove)

    def _excess(self, newest: Path) -> list[Path]:
        """Return the checkpoints of this run beyond ``keep``, the oldest first."""
        others = [
            path
            for path in complete(self.output_dir)
            if path != newest and run_folder.is_marked(path, self.run)
        ]
        if self.keep_every:
            others = [path for path in others if int(path.name) % self.keep_every]
        return others[: max(0, len(others) - (self.keep - 1))]

    def _check_ownership(self) -> None:
        """Raise RuntimeError if another process owns the folder, whose checkpoints must then not be
        changed.
        """
        if self.owner and not self.owner.is_held():
            raise RuntimeError(f"another process now owns {self.output_dir}")


def _check_files(tensors: Path) -> None:
    """Raise RuntimeError if files written by other ranks are missing."""
    files = {info.relative_path for info in read_metadata(tensors).storage_data.values()}
    if missing := sorted(name for name in files if not (tensors / name).is_file()):
        raise RuntimeError(
            f"{len(missing)} of {len(files)} checkpoint files are missing in {tensors}, such as "
            f"{missing[0]}: output_dir must be on a file system that all nodes share"
        )


@contextmanager
def _warnings_are_no_errors() -> Iterator[None]:
    """Context in which no warning ends a checkpoint, because a scorer may have turned warnings into
    errors. Other filters stay as they are.
    """
    if not any(action == "error" for action, *_ in warnings.filters):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
