"""Compilation and offloading in generation: models that are not in use are on the CPU, by the
original's default.
"""

import torch
from torch import nn

from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import parallelize
from hyvideo.models.offload import offload, offload_in_groups, total_bytes
from hyvideo.settings.offloading import Offloading
from hyvideo.settings.sections import DistributedSettings

# bytes of GPU memory, as in the original; also in the help of generate.py and in docs/generate.md
GROUPS_BELOW = 60 * 2**30


def resolve(flags: Offloading, device: torch.device) -> Offloading:
    """Return the flags with True or False for None: offloading on GPUs below ``GROUPS_BELOW``, not
    on a CPU.
    """
    is_small = device.type == "cuda" and total_bytes(device) < GROUPS_BELOW
    groups = flags.group_offloading
    if groups is None:
        groups = is_small and flags.offloading is not False
    whole = flags.offloading
    if whole is None:
        whole = is_small or groups
    return Offloading(whole, groups, groups and flags.overlap_group_offloading is not False)


def place(
    transformer: nn.Module,
    mesh: Mesh,
    device: torch.device,
    run: DistributedSettings,
    flags: Offloading,
    is_cached: bool,
) -> None:
    """Split, compile and offload a transformer that is on ``device`` or, for group offloading, on
    the CPU.

    With step caching, groups have one block: diffusers copies a group only if its first block runs.
    """
    parallelize(
        transformer,
        mesh,
        compile=run.enable_compile == "true",
        compile_backend=run.compile_backend,
        is_hooked=True,
    )
    if flags.group_offloading:
        size = 1 if is_cached else flags.blocks_per_group
        overlap = bool(flags.overlap_group_offloading) and device.type == "cuda"
        offload_in_groups(transformer, device, blocks_per_group=size, overlap=overlap)
    elif flags.offloading:
        offload(transformer)
