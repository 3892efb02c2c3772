"""A copy of the trained weights that can stand in for them: the anchor, and the running average.

The copy is made of what a rank holds, so nothing is gathered, and there is no second model: to compute with it, it is
exchanged in place with the weights of the policy, and back. Weights that are not trained are the same for both.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hyvideo.distributed.sharded_tensors import like, local, reshard


class WeightCopy:
    """As of now, a copy of ``trained``.

    Args:
        model: Whose parameters ``trained`` are, by name.
        offload: Keep the copy in the CPU's memory.
    """

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter], *, offload: bool = False):
        self.model, self.trained = model, dict(trained)
        self._parts = {
            name: _place(local(parameter).detach(), offload and parameter.device.type != "cpu")
            for name, parameter in self.trained.items()
        }
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Makes the copy equal to the policy, and makes sure of it."""
        for name, parameter in self.trained.items():
            self._parts[name].copy_(local(parameter), non_blocking=True)
        if different := self._different():
            raise RuntimeError(
                f"a copy of the weights did not become equal to them, at {', '.join(different[:3])} and perhaps more; "
                "weights that are not finite never do"
            )

    @torch.no_grad()
    def move_towards(self, weight: float) -> None:
        """``copy <- copy + weight * (policy - copy)``."""
        for name, parameter in self.trained.items():
            part = self._parts[name]
            part.lerp_(local(parameter).to(part.device), weight)

    @contextmanager
    def in_place(self) -> Iterator[nn.Module]:
        """The model with the copy's weights. Never between a forward pass and its backward pass."""
        self._exchange()
        try:
            yield self.model
        finally:
            self._exchange()

    def tensors(self) -> dict[str, Tensor]:
        """By name, sharded as the policy is."""
        return {name: like(self.trained[name], part) for name, part in self._parts.items()}

    def targets(self) -> dict[str, Tensor]:
        """To load into; `load` then takes what they hold."""
        return {name: torch.zeros_like(parameter) for name, parameter in self.trained.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, part in self._parts.items():
            part.copy_(local(tensors[name]))

    @torch.no_grad()
    def _exchange(self) -> None:
        reshard(self.model)  # what was gathered from the shards would hide the change
        for name, parameter in self.trained.items():
            part, own = self._parts[name], local(parameter)
            kept = own.clone()
            own.copy_(part, non_blocking=True)
            part.copy_(kept)

    def _different(self) -> list[str]:
        return [
            name
            for name, parameter in self.trained.items()
            if not torch.equal(self._parts[name], local(parameter).to(self._parts[name].device))
        ]


def _place(like_this: Tensor, offload: bool) -> Tensor:
    if offload:
        return torch.empty_like(like_this, device="cpu", pin_memory=True)
    return torch.empty_like(like_this)
