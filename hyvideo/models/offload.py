"""Offloading of frozen modules: their weights stay in pinned CPU memory except while they are used."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@torch.no_grad()
def offload(module: nn.Module) -> None:
    """Move a frozen module from its device to pinned CPU memory, until `on_device`. Has no effect on a CPU."""
    if (home := device_of(module)).type == "cpu":
        return
    module.home, module.hosts = home, {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        module.hosts[name] = nn.Parameter(host, False) if isinstance(tensor, nn.Parameter) else host
    _set(module, module.hosts)


@contextmanager
def on_device(module: nn.Module) -> Iterator[None]:
    """Keep a module on its device within the context, if it is offloaded. The contexts may be nested."""
    if device_of(module) == next(module.parameters()).device:
        yield
        return
    try:
        for name, host in module.hosts.items():
            there = host.detach().to(module.home, non_blocking=True)
            _set(module, {name: nn.Parameter(there, False) if isinstance(host, nn.Parameter) else there})
        yield
    finally:
        _set(module, module.hosts)  # the weights have not changed, so nothing is copied back


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes, also while it is offloaded."""
    return getattr(module, "home", None) or next(module.parameters()).device


def _set(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, tensor)
