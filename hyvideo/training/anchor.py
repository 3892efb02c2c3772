"""Weights of an earlier policy: the moving anchor, and copies of the trained weights that can stand in for them.

A copy is made of what a rank holds, so nothing is gathered, and there is no second model: to compute with it, it is
exchanged in place with the weights of the policy, and back. Weights that are not trained are the same for both.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hyvideo.distributed.sharded_tensors import like, local, reshard


class WeightCopy:
    """A copy of the ``trained`` parameters, exchanged in place with them; ``offload`` keeps it on the CPU."""

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter], *, offload: bool = False):
        self.model, self.trained, self._parts = model, dict(trained), {}
        for name, parameter in self.trained.items():
            place = {"device": "cpu", "pin_memory": True} if offload and parameter.device.type != "cpu" else {}
            self._parts[name] = torch.empty_like(local(parameter).detach(), **place)
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Makes the copy equal to the policy, and makes sure of it."""
        for name, parameter in self.trained.items():
            self._parts[name].copy_(local(parameter), non_blocking=True)
        different = [
            name
            for name, parameter in self.trained.items()
            if not torch.equal(self._parts[name], local(parameter).to(self._parts[name].device))
        ]
        if different:
            raise RuntimeError(
                f"a copy of the weights differs from them, at {', '.join(different[:3])} and perhaps more; "
                "weights that are not finite always do"
            )

    @torch.no_grad()
    def move_towards(self, weight: float) -> None:
        """``copy <- copy + weight * (policy - copy)``; AssertionError where the last weight moves away from it."""
        for name, parameter in self.trained.items():
            part, policy = self._parts[name], local(parameter).to(self._parts[name].device)
            before = policy - part
            part.lerp_(policy, weight)
        assert (before * (policy - part - before)).sum() <= 0, "the average moves away from the policy"

    @contextmanager
    def in_place(self) -> Iterator[nn.Module]:
        """The model with the copy's weights. Never between a forward pass and its backward pass."""
        self._exchange()
        try:
            yield self.model
        finally:
            self._exchange()

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name, sharded as the policy is."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the last exchange has arrived in the CPU's memory
        return {name: like(self.trained[name], part) for name, part in self._parts.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes saved tensors up, sharded as the policy is."""
        for name, part in self._parts.items():
            part.copy_(local(tensors[name]))

    @torch.no_grad()
    def _exchange(self) -> None:
        reshard(self.model)  # what was gathered from the shards would hide the change
        for name, parameter in self.trained.items():
            part, policy = self._parts[name], local(parameter)
            kept = policy.clone()
            policy.copy_(part, non_blocking=True)
            part.copy_(kept, non_blocking=True)


class Anchor(WeightCopy):
    """The policy that the position distance refers to: the initial one, or that of the last refresh.

    In LoRA training they are those of the adapter; the initial policy is a new adapter, which changes nothing, or the
    one that the run starts from. A refresh is due every ``refresh_every`` optimizer updates; never where that is None.
    """

    def __init__(
        self, model: nn.Module, trained: Mapping[str, nn.Parameter], *, refresh_every: int | None, offload: bool = False
    ):
        super().__init__(model, trained, offload=offload)
        self.refresh_every = refresh_every
        self.age = 0  # optimizer updates since the anchor was equal to the policy

    @property
    def equals_policy(self) -> bool:
        """Claims that the distance is exactly 0, with a gradient of exactly 0, so that no forward is needed."""
        return self.age == 0

    def after_iteration(self) -> None:
        """Copies the policy when it is due: never within an iteration, whose means belong to one anchor."""
        if self.refresh_every is not None and self.age >= self.refresh_every:
            self.take()
            self.age = 0
