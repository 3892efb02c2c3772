"""Offloading of frozen modules: their weights stay in CPU memory except while they are used, whole
or in blocks.

For a GPU, this memory is pinned, so that copies are fast and run beside the computation. Tensors are
pinned one by one, and the unpinned copy of each is freed before the next one, so that a model is never
in CPU memory twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class FrozenWeights:
    """Frozen parameters of a model that leave its device while no forward pass needs them.

    They do not change, so that nothing is copied back: the copies on the CPU stay. Trained
    parameters, of which the optimizer has the state, stay on the device, and so do buffers.
    """

    def __init__(self, model: nn.Module, home: torch.device):
        self.home = home
        self._places = [
            (module, name)
            for module in model.modules()
            if not hasattr(module, "offloaded")  # which is away on its own
            for name, parameter in module.named_parameters(recurse=False)
            if not parameter.requires_grad
        ]
        self._hosts = [in_host_memory(getattr(*place).detach(), home) for place in self._places]

    def leave(self) -> None:
        """Free the memory of the weights on the device."""
        for place, host in zip(self._places, self._hosts):
            _put(place, host)

    def come_back(self) -> None:
        """Copy the weights to the device again."""
        for place, host in zip(self._places, self._hosts):
            _put(place, host.to(self.home, non_blocking=True))


@torch.no_grad()
def offload(module: nn.Module, device: torch.device | None = None) -> None:
    """Freeze a module and move it to CPU memory, from which `on_device` copies it to ``device``, by
    default the one on which it is.

    Has no effect for a CPU.
    """
    device = device or device_of(module)
    if device.type == "cpu":
        return
    module.requires_grad_(False)
    _replace_each(module, lambda weight: in_host_memory(weight, device))
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    module.offloaded = FrozenWeights(module, device)


@contextmanager
def on_device(module: nn.Module) -> Iterator[None]:
    """Keep a module on its device within the context, if it is offloaded.

    The contexts may be nested.
    """
    offloaded = getattr(module, "offloaded", None)
    if offloaded is None or offloaded.home == next(module.parameters()).device:
        yield
        return
    try:
        offloaded.come_back()
        yield
    finally:
        offloaded.leave()


def offload_in_groups(model: nn.Module, device: torch.device, *, overlap: bool) -> nn.Module:
    """Keep a frozen model on the CPU and copy its blocks to ``device`` one after another during the
    forward pass.

    With ``overlap``, which needs a GPU, a block is copied from pinned memory while the previous one
    computes. Call it last: adapters added later would not be copied.
    """
    from diffusers.hooks import apply_group_offloading

    parents = (
        name
        for name, part in model.named_modules()
        if any(isinstance(x, nn.ModuleList) for x in part.children())
    )
    model.to("cpu")
    if overlap:  # diffusers would pin all of them before it frees the first unpinned one
        _replace_each(model, lambda weight: in_host_memory(weight, device))
    apply_group_offloading(
        model,
        onload_device=device,
        num_blocks_per_group=1,
        use_stream=overlap,
        # diffusers looks for lists of blocks only in these modules
        block_modules=next(parents).split("."),
    )
    return model


def in_host_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor in CPU memory, pinned if ``device`` is a GPU, to which it is copied."""
    if device.type != "cuda":
        return tensor.cpu()
    if is_traceable_wrapper_subclass(tensor):  # fp8, whose values and scales are pinned
        return tensor.cpu().pin_memory()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def total_bytes(device: torch.device) -> float:
    """Return the memory of a GPU; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes, also while it is offloaded."""
    if hasattr(module, "offloaded"):
        return module.offloaded.home
    return next(module.parameters()).device


def _replace_each(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the parameters of a module one by one; nothing keeps the earlier ones."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            changed = change(parameter.detach())
            setattr(part, name, nn.Parameter(changed, requires_grad=parameter.requires_grad))


def _put(place: tuple[nn.Module, str], weight: Tensor) -> None:
    setattr(*place, nn.Parameter(weight, requires_grad=False))
