"""Frozen modules that wait in CPU memory while they do not compute, as their `Placement` says.

For a GPU, this memory is pinned, so that copies are fast and run beside the computation. Tensors and
blocks move there one by one, and the earlier copy of each is freed before the next one, so that a
model is never in CPU memory twice.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hyvideo.models.placement import Placement

Place = tuple[nn.Module, str]  # of a parameter: its module, and its name there
_ALIGNMENT = 256  # bytes; the start of a tensor in the memory of its block


def put(
    module: nn.Module, placement: Placement, device: torch.device, *, pinned: bool = True
) -> None:
    """Move the frozen weights of a loaded module to where ``placement`` says, from which `on_device`
    brings them to ``device``.

    Trained weights and buffers are on ``device``. Call it last: parameters that are added later, and
    blocks that are compiled later, would not be found. Memory that is not ``pinned`` is copied more
    slowly; torch's allocator returns it to the system once it is freed.
    """
    if placement == Placement.GPU or (placement == Placement.CPU and device.type == "cpu"):
        return
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    blocks = _blocks(module) if placement == Placement.BLOCKS else []
    pinned = pinned and device.type == "cuda"
    streamed = StreamedBlocks(blocks, device, pinned=pinned) if blocks else None
    in_blocks = {part for block in blocks for part in block.modules()}
    others = [part for part in module.modules() if part not in in_blocks]
    module.offloaded = Offloaded(FrozenWeights(others, device, pinned=pinned), streamed)


def loaded_on(placement: Placement, device: torch.device) -> torch.device:
    """Return where the weights of a model are loaded to, before `put`."""
    return device if placement == Placement.GPU else torch.device("cpu")


@contextmanager
def on_device(module: nn.Module) -> Iterator[None]:
    """Keep a module on its device within the context, if it is offloaded.

    The contexts may be nested.
    """
    offloaded = getattr(module, "offloaded", None)
    if offloaded is None or not offloaded.is_away:
        yield
        return
    try:
        offloaded.come_back()
        yield
    finally:
        offloaded.leave()


def leave(module: nn.Module) -> None:
    """Free the memory of an offloaded module's weights on its device, until `come_back`."""
    if hasattr(module, "offloaded"):
        module.offloaded.leave()


def come_back(module: nn.Module) -> None:
    """Copy the weights of an offloaded module to its device, where they stay."""
    if hasattr(module, "offloaded"):
        module.offloaded.come_back()


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes, also while it is offloaded."""
    if hasattr(module, "offloaded"):
        return module.offloaded.home
    return next(module.parameters()).device


class Offloaded:
    """What `put` attaches to a module: its weights outside of blocks that are streamed, and these."""

    def __init__(self, weights: "FrozenWeights", blocks: "StreamedBlocks | None"):
        self.weights = weights
        self.blocks = blocks
        self.is_away = True

    @property
    def home(self) -> torch.device:
        """The device on which the module computes."""
        return self.weights.home

    def leave(self) -> None:
        self.weights.leave()
        if self.blocks:
            self.blocks.leave()
        self.is_away = True

    def come_back(self) -> None:
        self.weights.come_back()
        if self.blocks:
            self.blocks.come_back()
        self.is_away = False


class FrozenWeights:
    """Frozen parameters of modules that leave their device while no forward pass needs them; they
    are away at first.

    They do not change, so that nothing is copied back: the copies on the CPU stay. Trained
    parameters, of which the optimizer has the state, stay on the device.
    """

    def __init__(self, modules: Iterable[nn.Module], home: torch.device, *, pinned: bool):
        self.home = home
        shared: dict[int, list[Place]] = {}  # by parameter, which several modules may share
        for module in modules:
            if hasattr(module, "offloaded"):  # which is away on its own
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    shared.setdefault(id(parameter), []).append((module, name))
        self._places = list(shared.values())
        self._hosts = []
        for places in self._places:
            module, name = places[0]
            host = in_host_memory(getattr(module, name).detach(), pinned=pinned)
            _put(places, host)
            self._hosts.append(host)

    def leave(self) -> None:
        """Free the memory of the weights on the device."""
        for places, host in zip(self._places, self._hosts):
            _put(places, host)

    def come_back(self) -> None:
        """Copy the weights to the device."""
        for places, host in zip(self._places, self._hosts):
            _put(places, host.to(self.home, non_blocking=True))


class StreamedBlocks:
    """Frozen blocks that are called one after another, each of which is copied to the device while
    the block before it computes.

    All weights of a block are in one piece of memory. On the device, two pieces take turns: blocks
    with even numbers use the first one, and blocks with odd numbers the second.
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


def in_host_memory(tensor: Tensor, *, pinned: bool) -> Tensor:
    """Return a tensor in CPU memory, pinned or not."""
    if not pinned:
        return tensor.cpu()
    if is_traceable_wrapper_subclass(tensor):  # fp8, whose values and scales are pinned
        return tensor.cpu().pin_memory()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def total_bytes(device: torch.device) -> float:
    """Return the memory of a GPU; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: what the lists of its outermost module with lists contain."""
    for part in module.modules():
        lists = [child for child in part.children() if isinstance(child, nn.ModuleList)]
        if lists:
            return [block for blocks in lists for block in blocks]
    return []


def _put(places: Iterable[Place], weight: Tensor) -> None:
    parameter = nn.Parameter(weight, requires_grad=False)
    for module, name in places:
        setattr(module, name, parameter)


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
