"""Devices and streams of torch.cuda on the fake device, per thread as in CUDA; a CPU build of torch
lacks them.

torch.cuda's own Python code runs, for example ``torch.cuda.stream`` and ``torch.cuda.device``; only
the functions that it calls in C++ are replaced. `install` must run before a stream is created.
"""

import ctypes
import threading
from typing import NamedTuple

import torch

NUM_DEVICES = 4  # as in guard.cpp


class Step(NamedTuple):
    """An event recorded on a stream, or a stream's wait for it, or an operator."""

    stream: str
    what: str


names: dict[int, str] = {0: "default"}  # streams by id
# if a list, receives events, waits, collectives and attention in order of submission
log: list[Step] | None = None
_library: ctypes.CDLL


class Stream(torch.Stream):
    """A stream, like torch.cuda.Stream."""

    def __new__(cls, device=None, priority=0, **known):
        if not known:
            index = None if device is None else torch.device(device).index
            index = _library.fake_cuda_device() if index is None else index
            known = {
                "stream_id": _library.fake_cuda_new_stream(),
                "device_index": index,
                "device_type": 1,
            }
        return super().__new__(cls, **known)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def synchronize(self):
        note(self.stream_id, "synchronize")


class Event:
    """An event, like torch.cuda.Event; ``number`` counts the recorded events of its stream."""

    _recorded: dict[int, int] = {}

    def __init__(self, **_options):
        self.stream_id, self.number = None, 0

    def record(self, stream=None):
        self.stream_id = (stream or torch.cuda.current_stream()).stream_id
        self.number = self._recorded[self.stream_id] = self._recorded.get(self.stream_id, 0) + 1
        note(self.stream_id, f"record {self.number}")

    def wait(self, stream=None):
        stream = stream or torch.cuda.current_stream()
        if self.stream_id not in (None, stream.stream_id):
            note(
                stream.stream_id,
                f"wait for {names.get(self.stream_id, self.stream_id)} {self.number}",
            )

    def synchronize(self):
        pass

    def query(self):
        return True


def note(stream_id: int, what: str) -> None:
    if log is not None:
        log.append(Step(names.get(stream_id, str(stream_id)), what))


def current() -> tuple[str, int, int]:
    """Return the name of this thread, its current device, and the current stream of this device."""
    device = _library.fake_cuda_device()
    return threading.current_thread().name, device, _library.fake_cuda_stream(device)


def contexts(thread: int) -> list[int]:
    """Return the devices for which a thread, by its native id, would create a CUDA context or load
    it.
    """
    values = (ctypes.c_int64 * 10_000)()
    number = _library.fake_cuda_set_devices(values, len(values))
    assert number <= len(values)
    return [values[row + 1] for row in range(0, number, 2) if values[row] == thread]


def install(library: ctypes.CDLL) -> None:
    """Let torch.cuda use the devices and streams of guard.cpp."""
    global _library
    _library = library
    library.fake_cuda_stream.restype = library.fake_cuda_new_stream.restype = ctypes.c_int64
    library.fake_cuda_set_stream.argtypes = ctypes.c_int64, ctypes.c_int

    def current_stream(index):
        index = library.fake_cuda_device() if index < 0 else index
        return library.fake_cuda_stream(index), index, 1

    def set_stream(stream_id, device_index, device_type):
        library.fake_cuda_set_device(device_index)  # as THCPModule_setStream_wrap
        library.fake_cuda_set_stream(stream_id, device_index)

    # ctypes' functions cannot be hashed, as dynamo does
    torch._C._cuda_getDevice = lambda: library.fake_cuda_device()
    torch._C._cuda_setDevice = torch.cuda._exchange_device = lambda index: (
        library.fake_cuda_set_device(index)
    )
    torch.cuda._maybe_exchange_device = lambda index: library.fake_cuda_exchange_without_context(
        index
    )
    torch._C._cuda_getCurrentStream, torch._C._cuda_setStream = current_stream, set_stream
    torch._utils._get_available_device_type = lambda: "cuda"
    torch.cuda._lazy_init = torch.cuda.empty_cache = lambda: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.device_count = lambda: NUM_DEVICES
    torch.cuda.Stream = torch.cuda.streams.Stream = Stream
    torch.cuda.Event = torch.cuda.streams.Event = Event
    torch.accelerator.current_stream = torch.cuda.current_stream
