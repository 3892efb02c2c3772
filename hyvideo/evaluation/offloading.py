"""Offloading in generation: models that are not in use are on the CPU. Flags and default are the original's."""

from dataclasses import dataclass

import torch
from torch import nn

from hyvideo.models.group_offloading import offload_in_groups
from hyvideo.models.offload import offload

GROUPS_BELOW = 60 * 2**30  # bytes of GPU memory, as in the original
LARGE_GROUP = 4  # blocks per group without overlap


@dataclass(frozen=True)
class Offloading:
    """Flags of offloading; with None, the memory of the GPU decides. No flag changes the videos."""

    offloading: bool | None = None  # the VAE is on the GPU only to encode and decode, the transformer only to sample
    group_offloading: bool | None = None  # transformer and text encoder are on the GPU only in groups of blocks
    overlap_group_offloading: bool | None = None  # copy a block while the previous one computes

    def __post_init__(self) -> None:
        if self.group_offloading and self.offloading is False:
            raise ValueError(
                "--group_offloading true needs --offloading true: the transformer cannot stay on the GPU and be copied "
                "there in groups. Remove --offloading false, or set --group_offloading false"
            )

    def resolve(self, device: torch.device) -> "Offloading":
        """Return the flags with True or False for None: offloading on GPUs below ``GROUPS_BELOW``, not on a CPU."""
        is_small = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < GROUPS_BELOW
        groups = self.group_offloading
        if groups is None:
            groups = is_small and self.offloading is not False
        whole = is_small or groups if self.offloading is None else self.offloading
        return Offloading(whole, groups, groups and self.overlap_group_offloading is not False)

    def apply(self, transformer: nn.Module, device: torch.device) -> None:
        """Offload a transformer that is on ``device`` or, for group offloading, on the CPU; adapters must be added."""
        if self.group_offloading:
            size = 1 if self.overlap_group_offloading else LARGE_GROUP
            overlap = size == 1 and device.type == "cuda"
            offload_in_groups(transformer, device, blocks_per_group=size, overlap=overlap)
        elif self.offloading:
            offload(transformer)


AUTO = Offloading()
