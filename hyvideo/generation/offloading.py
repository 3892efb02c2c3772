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


def automatic(device: torch.device) -> Offloading:
    """Return group offloading for GPUs below ``GROUPS_BELOW``, none for larger ones and for a CPU."""
    is_small = device.type == "cuda" and total_bytes(device) < GROUPS_BELOW
    return "group" if is_small else "none"


def place(
    transformer: nn.Module,
    mesh: Mesh,
    device: torch.device,
    run: DistributedSettings,
    offloading: Offloading,
) -> None:
    """Split, compile and offload a transformer that is on ``device`` or, to be offloaded, on the
    CPU.
    """
    parallelize(
        transformer,
        mesh,
        compile=run.enable_compile == "true",
        is_hooked=True,
    )
    move_away(transformer, device, offloading)


def move_away(transformer: nn.Module, device: torch.device, offloading: Offloading) -> None:
    """Offload a transformer that is on the CPU; without offloading it is on ``device`` already."""
    if offloading == "group":
        offload_in_groups(transformer, device, overlap=device.type == "cuda")
    elif offloading == "model":
        offload(transformer, device)


def weights_device(device: torch.device, offloading: Offloading) -> torch.device:
    """Return where a transformer is loaded to."""
    return device if offloading == "none" else torch.device("cpu")
