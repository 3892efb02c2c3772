"""The policy that the position distance refers to: the initial one, or that of the last refresh."""

from collections.abc import Mapping

from torch import Tensor, nn

from hyvideo.training.weight_copy import WeightCopy


class Anchor:
    """The weights of an earlier policy, exchanged with the policy's own while its means are computed.

    In LoRA training they are those of the adapter, and the initial policy is the adapter that changes nothing.

    Args:
        refresh_every: Optimizer updates between two refreshes; None keeps the initial weights for ever.
        offload: Keep them on the CPU while they are not used.
    """

    def __init__(
        self,
        policy: nn.Module,
        trained: Mapping[str, nn.Parameter],
        *,
        refresh_every: int | None,
        offload: bool = False,
    ):
        self.copy = WeightCopy(policy, trained, offload=offload)
        self.refresh_every = refresh_every
        self.age = 0  # optimizer updates since the anchor was equal to the policy

    @property
    def equals_policy(self) -> bool:
        """Claims that the distance is exactly 0, with a gradient of exactly 0, so that no forward is needed."""
        return self.age == 0

    def in_place(self):
        """Context in which the policy's model computes as the anchor."""
        return self.copy.in_place()

    def after_update(self) -> None:
        """Counts one optimizer update."""
        self.age += 1

    def after_round(self) -> None:
        """Copies the policy when it is due: never within a round, whose means belong to one anchor."""
        if self.refresh_every is not None and self.age >= self.refresh_every:
            self.refresh()

    def refresh(self) -> None:
        """Makes the anchor equal to the policy; RuntimeError where it does not become so."""
        self.copy.take()
        self.age = 0

    def load(self, tensors: Mapping[str, Tensor] | None, age: int) -> None:
        """As saved; None is the policy as it is now."""
        if tensors is None:
            self.copy.take()
        else:
            self.copy.load(tensors)
        self.age = age
