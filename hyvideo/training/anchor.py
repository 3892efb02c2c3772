"""Copies of the trained weights: the anchor of the KL term and the EMA.

Each rank copies only its own shards. The copy and the policy's weights are swapped in place, and back after use.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hyvideo.distributed.sharded_tensors import local_shard, reshard, sharded_like


class WeightCopy:
    """A copy of the ``trained`` parameters that can be swapped into the model; ``offload`` keeps it on the CPU."""

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter], *, offload: bool = False):
        self.model, self.trained, self._copies = model, dict(trained), {}
        for name, parameter in self.trained.items():
            options = {"device": "cpu", "pin_memory": True} if offload and parameter.device.type != "cpu" else {}
            self._copies[name] = torch.empty_like(local_shard(parameter).detach(), **options)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the policy's weights."""
        for name, parameter in self.trained.items():
            self._copies[name].copy_(local_shard(parameter), non_blocking=True)

    @torch.no_grad()
    def move_towards(self, weight: float) -> None:
        """Update ``copy <- copy + weight * (policy - copy)`` and assert that it moved towards the policy."""
        for name, parameter in self.trained.items():
            part, policy = self._copies[name], local_shard(parameter).to(self._copies[name].device)
            before = policy - part
            part.lerp_(policy, weight)
        assert (before * (policy - part - before)).sum() <= 0, "the EMA moved away from the policy"

    @contextmanager
    def swapped_in(self) -> Iterator[nn.Module]:
        """Swap the copy into the model within the context. Do not use between a forward pass and its backward pass."""
        self._exchange()
        try:
            yield self.model
        finally:
            self._exchange()

    def tensors(self) -> dict[str, Tensor]:
        """Return the copied tensors by name, sharded like the policy."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # wait until the last swap has reached CPU memory
        return {name: sharded_like(self.trained[name], part) for name, part in self._copies.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load saved tensors, sharded like the policy."""
        for name, part in self._copies.items():
            part.copy_(local_shard(tensors[name]))

    @torch.no_grad()
    def _exchange(self) -> None:
        reshard(self.model)  # otherwise the next forward pass would use weights gathered from the old shards
        for name, parameter in self.trained.items():
            part, policy = self._copies[name], local_shard(parameter)
            previous = policy.clone()
            policy.copy_(part, non_blocking=True)
            part.copy_(previous, non_blocking=True)


class Anchor(WeightCopy):
    """The reference model of the position KL: the initial policy, or the policy at the last refresh.

    It is refreshed every ``refresh_every`` optimizer updates; None keeps it fixed. Of a LoRA run, it has adapter
    weights.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Mapping[str, nn.Parameter],
        *,
        refresh_every: int | None,
        offload: bool = False,
        has_own_guidance: bool = False,
    ):
        super().__init__(model, trained, offload=offload)
        self.refresh_every, self.has_own_guidance = refresh_every, has_own_guidance
        self.age = 0  # optimizer updates since the last refresh

    @property
    def equals_policy(self) -> bool:
        """Return whether the position KL and its gradient are exactly 0, so that the anchor needs no forward pass."""
        return self.age == 0 and not self.has_own_guidance

    def after_iteration(self) -> None:
        """Refresh the anchor if due. Call between iterations only: an iteration uses the same anchor throughout."""
        if self.refresh_every is not None and self.age >= self.refresh_every:
            self.refresh()
            self.age = 0
