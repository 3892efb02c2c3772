"""Copies of the trained weights: the anchor of the KL term and the EMA.

Each rank copies only its own shards. The copy and the policy's weights are swapped in place, and
back after use.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hyvideo.distributed.sharded_tensors import local_shard, reshard, sharded_like


class WeightCopy:
    """A copy of the ``trained`` parameters that can be swapped into the model.

    ``offload`` keeps it in pinned CPU memory. All arithmetic is on the GPU, and no copy makes the
    CPU wait for it.
    """

    def __init__(
        self, model: nn.Module, trained: Mapping[str, nn.Parameter], *, offload: bool = False
    ):
        self.model = model
        self.trained = dict(trained)
        self._copies: dict[str, Tensor] = {}
        for name, parameter in self.trained.items():
            policy = local_shard(parameter).detach()
            if offload and parameter.device.type != "cpu":
                self._copies[name] = torch.empty_like(policy, device="cpu", pin_memory=True)
            else:
                self._copies[name] = torch.empty_like(policy)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the policy's weights."""
        for name, parameter in self.trained.items():
            self._copies[name].copy_(local_shard(parameter), non_blocking=True)

    @torch.no_grad()
    def move_towards(self, weight: float) -> None:
        """Update ``copy <- copy + weight * (policy - copy)``."""
        for name, parameter in self.trained.items():
            policy = local_shard(parameter)
            # the copy itself if it is not offloaded
            average = self._copies[name].to(policy.device, non_blocking=True)
            average.lerp_(policy, weight)
            if average is not self._copies[name]:
                self._copies[name].copy_(average, non_blocking=True)

    @contextmanager
    def swapped_in(self) -> Iterator[nn.Module]:
        """Swap the copy into the model within the context.

        Do not use between a forward pass and its backward pass.
        """
        self._exchange()
        try:
            yield self.model
        finally:
            self._exchange()

    def tensors(self) -> dict[str, Tensor]:
        """Return the copied tensors by name, sharded like the policy."""
        if torch.cuda.is_available():
            # wait until the last swap has reached CPU memory
            torch.cuda.current_stream().synchronize()
        return {name: sharded_like(self.trained[name], part) for name, part in self._copies.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load saved tensors, sharded like the policy."""
        for name, part in self._copies.items():
            part.copy_(local_shard(tensors[name]))

    @torch.no_grad()
    def _exchange(self) -> None:
        # otherwise the next forward pass would use weights gathered from the old shards
        reshard(self.model)
        for name, parameter in self.trained.items():
            part, policy = self._copies[name], local_shard(parameter)
            previous = policy.clone()
            policy.copy_(part, non_blocking=True)
            part.copy_(previous, non_blocking=True)


class Anchor(WeightCopy):
    """The reference model of the position KL: the initial policy, the policy at the last refresh,
    or that of a file.

    It is refreshed every ``refresh_every`` optimizer updates; None keeps it fixed. Of a LoRA run,
    it has adapter weights.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Mapping[str, nn.Parameter],
        *,
        refresh_every: int | None,
        offload: bool = False,
        has_own_guidance: bool = False,
        is_given: bool = False,  # whether its weights come from a file and not from the policy
    ):
        super().__init__(model, trained, offload=offload)
        self.refresh_every = refresh_every
        self.has_own_guidance = has_own_guidance
        self.is_given = is_given
        self.age = 0  # optimizer updates since the last refresh

    @property
    def equals_policy(self) -> bool:
        """Return whether the position KL and its gradient are exactly 0, so that the anchor needs
        no forward pass.
        """
        return self.age == 0 and not self.has_own_guidance and not self.is_given

    def after_iteration(self) -> None:
        """Refresh the anchor if due.

        Call between iterations only: an iteration uses the same anchor throughout.
        """
        if self.refresh_every is not None and self.age >= self.refresh_every:
            self.refresh()
            self.age = 0
