"""Copies of the trained weights: the anchor of the KL term and the EMA.

Each rank copies its own shards, so nothing is gathered, and there is no second model: the copy is swapped in place with
the weights of the policy, and back. Frozen weights are shared by both.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hyvideo.distributed.sharded_tensors import like, local, reshard


class WeightCopy:
    """A copy of the ``trained`` parameters that can be swapped in for them; ``offload`` keeps it on the CPU."""

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter], *, offload: bool = False):
        self.model, self.trained, self._parts = model, dict(trained), {}
        for name, parameter in self.trained.items():
            options = {"device": "cpu", "pin_memory": True} if offload and parameter.device.type != "cpu" else {}
            self._parts[name] = torch.empty_like(local(parameter).detach(), **options)
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Copy the policy's weights. Raises RuntimeError if the copy differs from them, as with NaN weights."""
        for name, parameter in self.trained.items():
            self._parts[name].copy_(local(parameter), non_blocking=True)
        different = [
            name
            for name, parameter in self.trained.items()
            if not torch.equal(self._parts[name], local(parameter).to(self._parts[name].device))
        ]
        if different:
            raise RuntimeError(
                f"the copy of the weights differs from the weights in {len(different)} tensors, such as "
                f"{', '.join(different[:3])}; weights with NaN always differ. Lower learning_rate"
            )

    @torch.no_grad()
    def move_towards(self, weight: float) -> None:
        """Update ``copy <- copy + weight * (policy - copy)`` and assert that it moved towards the policy."""
        for name, parameter in self.trained.items():
            part, policy = self._parts[name], local(parameter).to(self._parts[name].device)
            before = policy - part
            part.lerp_(policy, weight)
        assert (before * (policy - part - before)).sum() <= 0, "the EMA moved away from the policy"

    @contextmanager
    def in_place(self) -> Iterator[nn.Module]:
        """Swap the copy's weights into the model. Do not use between a forward pass and its backward pass."""
        self._exchange()
        try:
            yield self.model
        finally:
            self._exchange()

    def tensors(self) -> dict[str, Tensor]:
        """Return the copied tensors by name, sharded like the policy."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # wait until the last swap has reached CPU memory
        return {name: like(self.trained[name], part) for name, part in self._parts.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load saved tensors, sharded like the policy."""
        for name, part in self._parts.items():
            part.copy_(local(tensors[name]))

    @torch.no_grad()
    def _exchange(self) -> None:
        reshard(self.model)  # weights gathered from the old shards would still be used
        for name, parameter in self.trained.items():
            part, policy = self._parts[name], local(parameter)
            previous = policy.clone()
            policy.copy_(part, non_blocking=True)
            part.copy_(previous, non_blocking=True)


class Anchor(WeightCopy):
    """The reference policy of the position KL: the initial policy, or the policy at the last refresh.

    In LoRA training it consists of adapter weights; the initial one has no effect unless the run starts from a LoRA.
    The anchor is refreshed every ``refresh_every`` optimizer updates; None keeps it fixed.
    """

    def __init__(
        self, model: nn.Module, trained: Mapping[str, nn.Parameter], *, refresh_every: int | None, offload: bool = False
    ):
        super().__init__(model, trained, offload=offload)
        self.refresh_every = refresh_every
        self.age = 0  # optimizer updates since the last refresh

    @property
    def equals_policy(self) -> bool:
        """Return whether the KL and its gradient are exactly 0, so that no forward pass is needed."""
        return self.age == 0

    def after_iteration(self) -> None:
        """Refresh the anchor if it is due; only between iterations, since an iteration uses one anchor throughout."""
        if self.refresh_every is not None and self.age >= self.refresh_every:
            self.take()
            self.age = 0
