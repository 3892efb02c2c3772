"""Flags of generate.py that take models off the GPU while they are not used; the plan of its memory reads them
too.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Offloading:
    """Flags of offloading; with None, the memory of the GPU decides.

    On a CPU, no flag changes a video (tested).
    """

    # the VAE is on the GPU only to encode and decode, the transformer only to sample
    offloading: bool | None = None
    # transformer and text encoder are on the GPU only in groups of blocks
    group_offloading: bool | None = None
    overlap_group_offloading: bool | None = None  # copy a block while the previous one computes

    def __post_init__(self) -> None:
        if self.group_offloading and self.offloading is False:
            raise ValueError(
                "--group_offloading true needs --offloading true, because the transformer cannot "
                "stay on the GPU and be copied there in groups, got --offloading false. Remove "
                "--offloading false, or set --group_offloading false"
            )

    def __str__(self) -> str:
        if self.group_offloading:
            return "group offloading"
        return "offloading" if self.offloading else "no offloading"

    @property
    def blocks_per_group(self) -> int:
        """Number of blocks that are copied together, as in the original."""
        return 1 if self.overlap_group_offloading else 4


AUTO = Offloading()
