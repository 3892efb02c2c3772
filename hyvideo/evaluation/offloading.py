"""Offloading in generation: models that are not in use are on the CPU. The default is the original's."""

import torch
from torch import nn

from hyvideo.config.offloading import Offloading
from hyvideo.models.offload import offload, offload_in_groups

GROUPS_BELOW = 60 * 2**30  # bytes of GPU memory, as in the original


def resolve(flags: Offloading, device: torch.device) -> Offloading:
    """Return the flags with True or False for None: offloading on GPUs below ``GROUPS_BELOW``, not on a CPU."""
    is_small = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < GROUPS_BELOW
    groups = flags.group_offloading
    if groups is None:
        groups = is_small and flags.offloading is not False
    whole = is_small or groups if flags.offloading is None else flags.offloading
    return Offloading(whole, groups, groups and flags.overlap_group_offloading is not False)


def apply(flags: Offloading, transformer: nn.Module, device: torch.device, *, skips_blocks: bool = False) -> None:
    """Offload a transformer that is on ``device`` or, for group offloading, on the CPU; adapters must be added.

    With ``skips_blocks``, groups have one block: diffusers copies a group only if its first block runs.
    """
    if flags.group_offloading:
        size = 1 if skips_blocks else flags.blocks_per_group
        overlap = bool(flags.overlap_group_offloading) and device.type == "cuda"
        offload_in_groups(transformer, device, blocks_per_group=size, overlap=overlap)
    elif flags.offloading:
        offload(transformer)
