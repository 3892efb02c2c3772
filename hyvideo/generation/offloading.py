"""Compilation and offloading in generation: models that are not in use are on the CPU, by the
original's default.
"""

import torch
from torch import nn

from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import parallelize
from hyvideo.models.offload import offload, offload_in_groups, total_bytes
from hyvideo.models.sizes import read_architecture
from hyvideo.planning.generation import automatic_way
from hyvideo.planning.memory import GIB
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.config import Config
from hyvideo.settings.offloading import Offloading
from hyvideo.settings.sampling import Sampling
from hyvideo.settings.sections import DistributedSettings


def automatic(device: torch.device, config: Config, sampling: Sampling) -> Offloading:
    """Return the way of offloading for videos of a config on a device: none on a CPU, else that of
    `automatic_way`.
    """
    if device.type == "cpu":
        return "none"
    model = config.model
    architecture = read_architecture(model.pretrained_model_root, model.transformer_version)
    run = PlannedRun(config, 1, architecture).sampled_as(sampling, batch_size=1)
    return automatic_way(run, total_bytes(device) / GIB)


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
