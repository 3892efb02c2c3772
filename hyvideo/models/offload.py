"""Offloading of frozen modules: their weights stay in CPU memory except while they are used, whole
or in groups.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@torch.no_grad()
def offload(module: nn.Module) -> None:
    """Move a frozen module from its device to pinned CPU memory, until `on_device`.

    Has no effect on a CPU.
    """
    home = device_of(module)
    if home.type == "cpu":
        return
    module.home = home
    module.hosts = {
        name: torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        for name, tensor in module.state_dict().items()
    }
    module.load_state_dict(module.hosts, assign=True)


@contextmanager
def on_device(module: nn.Module) -> Iterator[None]:
    """Keep a module on its device within the context, if it is offloaded.

    The contexts may be nested.
    """
    if device_of(module) == next(module.parameters()).device:
        yield
        return
    try:
        there = {
            name: host.to(module.home, non_blocking=True) for name, host in module.hosts.items()
        }
        module.load_state_dict(there, assign=True)
        del there
        yield
    finally:
        # the weights have not changed: nothing is copied back
        module.load_state_dict(module.hosts, assign=True)


class FrozenWeights:
    """The frozen weights of a model that is trained, which may leave its device while no forward
    pass needs them.

    They do not change, so that nothing is copied back: the copies on the CPU stay. Trained
    parameters, of which the optimizer has the state, stay on the device.
    """

    def __init__(self, model: nn.Module):
        self._places = [
            (module, name)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if not parameter.requires_grad and parameter.device == device_of(model)
        ]
        self._home = device_of(model)
        self._hosts = [getattr(*place).detach().cpu() for place in self._places]
        if self._home.type == "cuda":  # the parts of a tensor in fp8 cannot be pinned
            self._hosts = [
                host.pin_memory() if type(host) is torch.Tensor else host for host in self._hosts
            ]

    def leave(self) -> None:
        """Free the memory of the weights on the device."""
        self._put(self._hosts)

    def come_back(self) -> None:
        """Copy the weights to the device again."""
        self._put([host.to(self._home, non_blocking=True) for host in self._hosts])

    def _put(self, weights: list[torch.Tensor]) -> None:
        for (module, name), weight in zip(self._places, weights):
            setattr(module, name, nn.Parameter(weight, requires_grad=False))


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
    apply_group_offloading(
        model.to("cpu"),
        onload_device=device,
        num_blocks_per_group=1,
        use_stream=overlap,
        # diffusers looks for lists of blocks only in these modules
        block_modules=next(parents).split("."),
    )
    return model


def total_bytes(device: torch.device) -> float:
    """Return the memory of a GPU; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes, also while it is offloaded."""
    return getattr(module, "home", None) or next(module.parameters()).device
