"""Where the models of a program are while they do not compute, and what that costs: bytes on the GPU
and on the host, and bytes that are copied from the host.

Programs and plans ask the same `Placements`; `offload.put` moves the weights. Imports no torch.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

# The ways of generate.py: all models on the GPU; models on the CPU while they do not compute; blocks
# of transformer and text encoder also on the CPU until they compute.
Offloading = Literal["none", "model", "group"]


class Placement(StrEnum):
    """Where a model is. On the CPU, its memory is pinned if the device is a GPU."""

    GPU = "gpu"  # on the device
    CPU = "cpu"  # on the device while it is used
    BLOCKS = "blocks"  # as CPU, but its blocks come to the device one after another


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights of a model, of which ``outer`` are outside of its equal blocks."""

    total: float
    outer: float = 0.0
    num_blocks: int = 1

    @property
    def of_blocks(self) -> float:
        return self.total - self.outer

    def on_gpu(self, placement: Placement, *, is_used: bool = True) -> float:
        """Return the bytes on the GPU while the model is used, or while it is not."""
        if placement == Placement.GPU:
            return self.total
        if not is_used:
            return 0.0
        if placement == Placement.CPU:
            return self.total
        # the block that computes, and the next one
        return self.outer + min(2, self.num_blocks) * self.of_blocks / self.num_blocks

    def on_host(self, placement: Placement) -> float:
        """Return the bytes on the host."""
        return 0.0 if placement == Placement.GPU else self.total

    def while_put(self, placement: Placement) -> float:
        """Return the bytes on the host that moving the weights there takes in addition: a block."""
        return self.of_blocks / self.num_blocks if placement == Placement.BLOCKS else 0.0

    def copied(self, placement: Placement, *, uses: float, forwards: float) -> float:
        """Return the bytes that are copied to the GPU for a number of uses, and of forward passes
        within them.
        """
        if placement == Placement.GPU:
            return 0.0
        if placement == Placement.CPU:
            return uses * self.total
        return uses * self.outer + forwards * self.of_blocks


def taking_turns(models: Iterable[tuple[Weights, Placement]]) -> float:
    """Return the most bytes on the GPU of models of which one is used at a time."""
    always = 0.0
    turns = [0.0]
    for weights, placement in models:
        idle = weights.on_gpu(placement, is_used=False)
        always += idle
        turns.append(weights.on_gpu(placement) - idle)
    return always + max(turns)


@dataclass(frozen=True)
class Placements:
    """The placement of each model of a program."""

    policy: Placement = Placement.GPU  # or the single transformer; trained weights stay on the GPU
    partner: Placement = Placement.GPU  # the other expert
    vae: Placement = Placement.GPU
    encoders: Placement = Placement.GPU
    scorers: Placement = Placement.GPU  # held-out scorers are always on the CPU
    copies: Placement = Placement.GPU  # the anchor and the EMA

    @classmethod
    def of_run(cls, offload: Collection[str]) -> "Placements":
        """Return the placements of a training with the setting ``offload``. Its policy leaves the GPU
        while scorers work.
        """

        def place(name: str, away: Placement = Placement.CPU) -> Placement:
            return away if name in offload else Placement.GPU

        return cls(
            policy=place("policy"),
            partner=place("partner", Placement.BLOCKS),
            vae=place("vae"),
            scorers=place("reward"),
            copies=place("anchor"),
        )

    @classmethod
    def of_sampling(cls, way: Offloading) -> "Placements":
        """Return the placements of a program that samples videos in one of the ways of generate.py."""
        if way == "none":
            return ON_DEVICE
        transformer = Placement.BLOCKS if way == "group" else Placement.CPU
        return cls(
            policy=transformer,
            partner=transformer,
            vae=Placement.CPU,
            # they compute first and are then freed
            encoders=Placement.BLOCKS if way == "group" else Placement.GPU,
            scorers=Placement.CPU,
        )


ON_DEVICE = Placements()
