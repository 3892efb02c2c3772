"""Frozen blocks that come to the device one after another, each while the block before it computes.

All weights of a block are in one piece of CPU memory. On the device, two pieces take turns: blocks
with even numbers use the first one, and blocks with odd numbers the second.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_ALIGNMENT = 256  # bytes; the start of a tensor in the memory of its block


class StreamedBlocks:
    """Blocks that are called one after another, between `come_back` and `leave`.

    The blocks must be frozen and, if they are compiled, compiled already. Their CPU memory is
    ``pinned`` or not.
    """

    def __init__(self, blocks: Sequence[nn.Module], home: torch.device, *, pinned: bool):
        self.home = home
        self._packed = []
        for index, block in enumerate(blocks):
            self._packed.append(PackedBlock(block, pinned=pinned))
            block.forward = self._streamed(index, block.forward)
        self._stream = torch.cuda.Stream(home) if home.type == "cuda" else None
        self._buffers: list[Tensor] = []
        self._held: list[int | None] = [None, None]  # number of the block in each buffer
        self._ready: list[torch.cuda.Event | None] = [None, None]

    def come_back(self) -> None:
        """Allocate the memory on the device."""
        sizes = [packed.host.nbytes for packed in self._packed]
        self._buffers = [
            torch.empty(max(sizes[parity::2], default=0), dtype=torch.uint8, device=self.home)
            for parity in range(2)
        ]
        for index, packed in enumerate(self._packed):
            packed.use(self._buffers[index % 2])

    def leave(self) -> None:
        """Free the memory on the device."""
        if self._stream and self._buffers:  # a copy to it may not be done
            torch.cuda.current_stream(self.home).wait_stream(self._stream)
        for packed in self._packed:
            packed.use(None)
        self._buffers = []
        self._held = [None, None]

    def _streamed(self, index: int, forward: Callable) -> Callable:
        """Return the forward pass of a block, within which the block is on the device."""

        @functools.wraps(forward)
        def streamed(*inputs: Any, **options: Any) -> Any:
            assert self._buffers, "an offloaded module must be called within `on_device`"
            parity = index % 2
            self._copy(index)
            if self._stream:
                torch.cuda.current_stream(self.home).wait_event(self._ready[parity])
            following = (index + 1) % len(self._packed)
            if following % 2 != parity:
                self._copy(following)
            self._packed[index].put_on_device()
            try:
                return forward(*inputs, **options)
            finally:
                self._packed[index].put_on_host()

        return streamed

    def _copy(self, index: int) -> None:
        """Start to copy a block into its buffer, once what has been submitted no longer needs it."""
        parity = index % 2
        if self._held[parity] == index:
            return
        self._held[parity] = index
        host = self._packed[index].host
        target = self._buffers[parity][: host.nbytes]
        if self._stream is None:
            target.copy_(host)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.home))
        with torch.cuda.stream(self._stream):
            target.copy_(host, non_blocking=True)
        self._ready[parity] = self._stream.record_event()


class PackedBlock:
    """The weights of a block in one piece of CPU memory, and the same weights in a buffer."""

    def __init__(self, block: nn.Module, *, pinned: bool):
        self._places = [
            (part, name)
            for part in block.modules()
            for name, _ in part.named_parameters(recurse=False)
        ]
        trained = [name for name, weight in block.named_parameters() if weight.requires_grad]
        assert not trained, (
            f"only frozen blocks are streamed, but these weights are trained: {trained}"
        )
        sizes = [
            [_aligned(part.nbytes) for part in _parts_of(getattr(module, name))]
            for module, name in self._places
        ]
        self.host = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8, pin_memory=pinned)
        self._hosts = self._parameters(self.host)
        for (module, name), parameter in zip(self._places, self._hosts):
            for target, part in zip(_parts_of(parameter), _parts_of(getattr(module, name))):
                target.copy_(part.detach())
            setattr(module, name, parameter)
        self._on_device: list[nn.Parameter] = []

    def use(self, buffer: Tensor | None) -> None:
        """Let the block use a buffer on the device, or none."""
        self._on_device = [] if buffer is None else self._parameters(buffer)

    def put_on_device(self) -> None:
        for (module, name), parameter in zip(self._places, self._on_device, strict=True):
            setattr(module, name, parameter)

    def put_on_host(self) -> None:
        for (module, name), parameter in zip(self._places, self._hosts):
            setattr(module, name, parameter)

    def _parameters(self, memory: Tensor) -> list[nn.Parameter]:
        """Return parameters whose values are in ``memory``, one after another."""
        parameters = []
        start = 0
        for module, name in self._places:
            weight = getattr(module, name).detach()
            parts = []
            for part in _parts_of(weight):
                values = memory[start : start + part.nbytes].view(part.dtype).view(part.shape)
                parts.append(values)
                start += _aligned(part.nbytes)
            parameters.append(nn.Parameter(_with_parts(weight, parts), requires_grad=False))
        return parameters


def _parts_of(weight: Tensor) -> list[Tensor]:
    """Return the tensors that a weight consists of: those of a quantized one, or itself."""
    if not is_traceable_wrapper_subclass(weight):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [getattr(weight, name) for name in names]


def _with_parts(weight: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return a weight of the same kind that consists of other tensors."""
    if not is_traceable_wrapper_subclass(weight):
        return parts[0]
    names, context = weight.__tensor_flatten__()
    inner = dict(zip(names, parts, strict=True))
    return type(weight).__tensor_unflatten__(inner, context, weight.size(), weight.stride())


def _aligned(size: int) -> int:
    """Return the bytes that a tensor takes in the memory of its block."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
