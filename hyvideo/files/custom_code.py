"""The boundary for code of the user: a reward, a sampler, an objective or a model family.

    found      `load_object` imports ``FILE.py:NAME`` or ``module:NAME``
    called     `restored_state` puts back what the code changes in the process, and keeps it from
               ending the program
    in time    `Worker` calls it in a thread, which cannot keep the program alive
    answered   `check_tensor` checks shape and kind of a tensor

Nothing here imports torch when it is imported, because the rules between settings import it first.
"""

import atexit
import functools
import importlib
import importlib.util
import os
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from hyvideo.files.text import describe_error, nearest, quote

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

EXIT_SECONDS = 30.0  # that the end of the program waits for a job of a `Worker`


def load_object(place: str, kind: str) -> Any:
    """Return what ``FILE.py:NAME`` or ``module:NAME`` names.

    ``kind`` is the setting that has the place. Raises ValueError if the code cannot be imported,
    or has no such name.
    """
    location, _, name = place.rpartition(":")
    module = load_module(location, kind)
    if not name or not hasattr(module, name):
        hint = nearest(name, vars(module)) or "correct the name"
        raise ValueError(f"{kind} {place}: {location} has no {quote(name)}; {hint}")
    return getattr(module, name)


def load_module(location: str, kind: str) -> ModuleType:
    """Import a ``FILE.py``, the package in a folder, or a module by its name, once.

    Raises ValueError if the import raises anything.
    """
    if location.endswith(".py") and not os.path.lexists(location):
        raise ValueError(f"{kind}: file not found: {location}")
    try:
        with restored_state():
            if location.endswith(".py"):
                path = os.path.realpath(location)
                # The file may import modules beside it, as a program may. Installed ones are first.
                folder = os.path.dirname(path)
                if folder not in sys.path:
                    sys.path.append(folder)
                return _import_file(path, path)
            if os.path.isdir(location):
                folder = Path(location).resolve()
                return _import_file(folder.name, str(folder / "__init__.py"))
            return importlib.import_module(location)
    except Exception as error:
        raise ValueError(
            f"{kind} {quote(location)} cannot be imported: {describe_error(error)}"
        ) from error


@functools.cache
def _import_file(name: str, file: str) -> ModuleType:
    is_package = Path(file).name == "__init__.py"
    parents = [str(Path(file).parent)] if is_package else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=parents)
    # dataclasses look up their module in sys.modules
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def code_files(places: Iterable[str]) -> list[Path]:
    """Return the files of the code that settings name as ``FILE.py:NAME`` or ``module:NAME``,
    without built-in names.
    """
    files = []
    for place in places:
        location = place.rpartition(":")[0]
        if location.endswith(".py"):
            files.append(Path(location))
        elif location:
            files.append(Path(importlib.util.find_spec(location).origin))
    return list(dict.fromkeys(files))


@contextmanager
def restored_state() -> Iterator[None]:
    """Context manager for code of the user: restore six settings of the process that it may change,
    because they would also affect the training.

    Raises RuntimeError in place of SystemExit, with which the program would end as if it had
    succeeded.
    """
    settings = _settings()
    before = [read() for read, _ in settings]
    try:
        yield
    except SystemExit as error:
        raised = RuntimeError(f"the code has called sys.exit({error.code!r})")
        raise raised.with_traceback(error.__traceback__) from None
    finally:
        for (read, write), value in zip(settings, before):
            if read() != value:
                write(value)


def _settings() -> tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...]:
    """Return the functions that read and write each setting."""
    import torch

    return (
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, _set_default_device),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),  # such as TF32
        (os.getcwd, os.chdir),
    )


def _set_default_device(device: "torch.device") -> None:
    import torch

    # A default device costs time in every call, so the CPU is not set as one.
    torch.set_default_device(None if device.type == "cpu" else device)


def add_place(error: BaseException, module: str) -> None:
    """Add the line where an error was raised in the file of a module, as a note for
    `describe_error`.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    if own:
        error.add_note(f"{Path(file).name}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}")


@contextmanager
def named_errors(what: str, module: str) -> Iterator[None]:
    """Context manager for code of the user in ``module``, which may raise anything: raise ValueError
    with ``what`` and the error in its place, and restore the settings of the process.

    A GPU that is out of memory is no fault of the code.
    """
    import torch

    try:
        with restored_state():
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        add_place(error, module)
        raise ValueError(f"{what}: {describe_error(error)}") from error


def check_tensor(value: object, shape: tuple[int | None, ...], what: str) -> "torch.Tensor":
    """Return a real tensor of a shape, in which None stands for any size.

    Raises ValueError, which begins with ``what``, for anything else.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{what} must be a tensor of shape {shape}, got {type(value).__name__}")
    fits = len(value.shape) == len(shape) and all(
        expected in (None, size) for size, expected in zip(value.shape, shape)
    )
    if not fits or value.is_complex():
        raise ValueError(
            f"{what} must be a real tensor of shape {shape}, got {value.dtype} of shape "
            f"{tuple(value.shape)}"
        )
    return value


class Worker:
    """A thread that runs jobs in the order in which they are submitted.

    The program does not wait for a job that hangs: at its end, a job has ``EXIT_SECONDS``.
    """

    def __init__(self, prepare: Callable[[], object] = lambda: None):
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._jobs, prepare), name="worker", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False
        atexit.register(_end, self._jobs, self._thread, EXIT_SECONDS)

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self, seconds: float | None) -> None:
        """End the thread after the submitted jobs, and wait for it; None: without a limit."""
        _end(self._jobs, self._thread, seconds)


def _work(jobs: queue.SimpleQueue, prepare: Callable[[], object]) -> None:
    # The worker is no argument, so that the thread ends when nothing refers to it any more.
    prepare()
    while True:
        entry = jobs.get()
        if entry is None:
            return
        future, job = entry
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:  # `result` raises it
                future.set_exception(error)
        del entry, future, job  # they refer to videos while the thread waits for the next job


def _end(jobs: queue.SimpleQueue, thread: threading.Thread, seconds: float | None) -> None:
    jobs.put(None)
    thread.join(seconds)
