"""The policy that the position distance refers to: the initial one, or that of the last refresh."""

import copy

import torch
from torch import Tensor, nn


class Anchor:
    """A frozen copy of the policy.

    Args:
        refresh_every: Optimizer updates between two refreshes; None keeps the initial weights for ever.
        offload: Keep the copy on the CPU while it is not used.
    """

    def __init__(self, policy: nn.Module, *, refresh_every: int | None, offload: bool = False):
        self.model = copy.deepcopy(policy).requires_grad_(False)
        self.refresh_every = refresh_every
        self.age = 0  # optimizer updates since the anchor was equal to the policy
        self._device = next(policy.parameters()).device
        self._offload = offload and self._device.type != "cpu"
        if self._offload:
            self.model.to("cpu")

    @property
    def equals_policy(self) -> bool:
        """Claims that the distance is exactly 0, with a gradient of exactly 0, so that no forward is needed."""
        return self.age == 0

    def __enter__(self) -> nn.Module:
        """The model, where the policy computes."""
        if self._offload:
            self.model.to(self._device)
        return self.model

    def __exit__(self, *exception) -> None:
        if self._offload:
            self.model.to("cpu")

    def after_update(self) -> None:
        """Counts one optimizer update."""
        self.age += 1

    def after_round(self, policy: nn.Module) -> None:
        """Copies the policy when it is due: never within a round, whose means belong to one anchor."""
        if self.refresh_every is not None and self.age >= self.refresh_every:
            self.refresh(policy)

    @torch.no_grad()
    def refresh(self, policy: nn.Module) -> None:
        """Makes the anchor equal to the policy; an anchor that is not is an error, not a warning."""
        pairs = list(zip(self.model.named_parameters(), policy.named_parameters(), strict=True))
        for (name, target), (source_name, source) in pairs:
            assert name == source_name and target.shape == source.shape, f"anchor and policy differ at {name}"
            target.copy_(source)
        self.age = 0

    def state_dict(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def load_state_dict(self, tensors: dict[str, Tensor], age: int) -> None:
        self.model.load_state_dict(tensors)
        self.age = age
