"""Group offloading by diffusers: weights stay on the CPU, and each group of blocks is copied to the GPU to compute."""

import torch
from torch import nn


def offload_in_groups(model: nn.Module, device: torch.device, *, blocks_per_group: int, overlap: bool) -> nn.Module:
    """Keep a frozen model on the CPU and copy its blocks to ``device`` in groups during the forward pass.

    With ``overlap``, a group is copied from pinned memory while the previous one computes; this needs a GPU and groups
    of one block. Call it last: adapters added later would not be copied.
    """
    from diffusers.hooks import apply_group_offloading

    parents = (
        name for name, part in model.named_modules() if any(isinstance(x, nn.ModuleList) for x in part.children())
    )
    apply_group_offloading(
        model.to("cpu"),
        onload_device=device,
        num_blocks_per_group=blocks_per_group,
        use_stream=overlap,
        block_modules=next(parents).split("."),  # diffusers looks for lists of blocks only in these modules
    )
    return model
