"""Asynchronous checkpoint writing by all ranks; a checkpoint becomes visible by one rename."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hyvideo.checkpoints.format import (
    TENSORS,
    complete,
    delete,
    digest_files,
    folder_of,
    is_complete,
    write_digests,
    write_state,
)
from hyvideo.checkpoints.reader import read_metadata
from hyvideo.distributed.collectives import all_objects, from_main, raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.files import run_folder
from hyvideo.files.files import optional, publish

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
        timeout: float = 1800.0,  # seconds that ranks wait for each other
        # called on the main rank before anything is renamed or deleted; raises NotOwner
        check_owner: Callable[[], None] = lambda: None,
        run: str,  # marks the checkpoints; others are not deleted
    ):
        self.output_dir = output_dir
        self.mesh = mesh
        self.is_asynchronous = is_asynchronous
        self.keep = keep
        self.check_owner = check_owner
        self.run = run
        self.last_failed = False  # whether the newest checkpoint could not be written
        # start and, once it has ended, end of the newest write (`perf_counter`)
        self.spans: list[list[float]] = []
        # A separate group, so that the thread's collectives cannot mix with those of the training.
        limit = timedelta(seconds=timeout)
        self._group = dist.new_group(backend="gloo", timeout=limit) if mesh.world_size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None

    def save(
        self,
        iteration: int,
        tensors: Mapping[str, Tensor],
        state: dict,  # JSON: counters and small values, which nobody changes afterwards
        # writes additional files; called on the main rank
        files: Callable[[Path], None] = lambda folder: None,
    ) -> Path:
        """Wait for the previous checkpoint, then start writing this one and return its folder.

        An iteration that is saved is not saved again. Collective.
        """
        self.wait()
        target = folder_of(self.output_dir, iteration)
        is_saved = is_complete(target) and run_folder.is_marked(target, self.run)
        if from_main(is_saved, self.mesh):
            return target
        copied = {
            name: tensor.detach().to("cpu", copy=self.is_asynchronous)
            for name, tensor in tensors.items()
        }
        self.spans = [[time.perf_counter()]]
        self._pending = self._thread.submit(self._write, target, copied, state, files)
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
        # the reason is the same on all ranks
        with optional("checkpoint", _FAILURES, is_shown=self.mesh.is_main) as problems:
            pending.result()
        self.last_failed = bool(problems)

    def _write(
        self, target: Path, tensors: dict[str, Tensor], state: dict, files: Callable[[Path], None]
    ) -> None:
        try:
            with self._published(target) as partial:
                dcp.save(
                    tensors,
                    # All tensors are on the CPU. With copy-ahead, the library would request a CUDA
                    # stream, which in this thread would be on the first GPU, so that every process
                    # of the node would allocate memory there.
                    storage_writer=dcp.FileSystemWriter(partial / TENSORS, per_thread_copy_ahead=0),
                    process_group=self._group,
                    no_dist=self._group is None,
                )
                with self._raise_on_all_ranks():
                    if self.mesh.is_main:
                        _check_files(partial / TENSORS)
                        files(partial)
                        write_state(partial, state)
                self._write_digests(partial)
            with self._raise_on_all_ranks():
                if self.mesh.is_main:
                    self._delete_excess(target)
        finally:
            self.spans[0].append(time.perf_counter())

    @contextmanager
    def _published(self, target: Path) -> Iterator[Path]:
        """Context manager on all ranks that yields the hidden folder, which the main rank publishes
        as ``target``.
        """
        with ExitStack() as stack:
            name = ""
            with self._raise_on_all_ranks():
                if self.mesh.is_main:
                    partial = stack.enter_context(publish(target, is_folder=True))
                    run_folder.mark(partial, self.run)
                    name = partial.name
            yield target.with_name(all_objects(name, self.mesh, self._group)[0])
            with self._raise_on_all_ranks():
                if self.mesh.is_main:
                    self.check_owner()
                    stack.close()
                    run_folder.update_record(self.output_dir, has_checkpoint=True)

    def _write_digests(self, partial: Path) -> None:
        """Write the digests of all files, each rank's share of which it computes."""
        digests: dict[str, str] = {}
        # before the next collective, which a rank that fails would miss
        with self._raise_on_all_ranks():
            digests = digest_files(partial, rank=self.mesh.rank, num_ranks=self.mesh.world_size)
        shares = all_objects(digests, self.mesh, self._group)
        with self._raise_on_all_ranks():
            if self.mesh.is_main:
                merged = {name: digest for share in shares for name, digest in share.items()}
                write_digests(partial, merged)

    def _raise_on_all_ranks(self) -> AbstractContextManager:
        return raise_on_all_ranks(self.mesh, self._group, (RuntimeError, Exception))

    def _delete_excess(self, newest: Path) -> None:
        """Delete the checkpoints of this run beyond ``keep``, the oldest first."""
        if not self.keep:
            return
        others = [
            path
            for path in complete(self.output_dir)
            if path != newest and run_folder.is_marked(path, self.run)
        ]
        for path in others[: max(0, len(others) - (self.keep - 1))]:
            self.check_owner()
            delete(path)


def _check_files(tensors: Path) -> None:
    """Raise RuntimeError if files written by other ranks are missing."""
    files = {info.relative_path for info in read_metadata(tensors).storage_data.values()}
    if missing := sorted(name for name in files if not (tensors / name).is_file()):
        raise RuntimeError(
            f"{len(missing)} of {len(files)} checkpoint files are missing in {tensors}, such as "
            f"{missing[0]}: output_dir must be on a file system that all nodes share"
        )
