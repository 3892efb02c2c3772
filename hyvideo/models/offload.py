"""Frozen modules that wait in CPU memory while they do not compute, as their `Placement` says.

For a GPU, this memory is pinned, so that copies are fast and run beside the computation. Tensors and
blocks move there one by one, and the earlier copy of each is freed before the next one, so that a
model is never in CPU memory twice.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hyvideo.models.placement import Placement
from hyvideo.models.streaming import StreamedBlocks

Place = tuple[nn.Module, str]  # of a parameter: its module, and its name there


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


@contextmanager
def away(module: nn.Module) -> Iterator[None]:
    """Free the memory of an offloaded module's weights on its device within the context; afterwards,
    they are again where they were.
    """
    offloaded = getattr(module, "offloaded", None)
    was_on_device = offloaded is not None and not offloaded.is_away
    leave(module)
    yield
    if was_on_device:
        come_back(module)


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
        if not self.is_away:
            return
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
