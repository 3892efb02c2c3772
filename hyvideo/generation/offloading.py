"""Offloading and compilation in generation: models that are not in use are on the CPU, by the
original's default.
"""

import torch
from torch import nn

from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import parallelize
from hyvideo.models.offload import total_bytes
from hyvideo.models.placement import Offloading
from hyvideo.models.sizes import read_architecture
from hyvideo.planning.generation import automatic_way
from hyvideo.planning.memory import GIB
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.config import Config
from hyvideo.settings.sampling import Sampling
from hyvideo.settings.sections import DistributedSettings


def automatic_offloading(
    device: torch.device, config: Config, sampling: Sampling, *, has_scorers: bool = False
) -> Offloading:
    """Return the way of offloading for videos of a config on a device, scored or not: none on a CPU,
    else that of `automatic_way`.
    """
    if device.type == "cpu":
        return "none"
    model = config.model
    architecture = read_architecture(model.pretrained_model_root, model.transformer_version)
    run = PlannedRun(config, 1, architecture).sampled_as(sampling, batch_size=1)
    return automatic_way(run, total_bytes(device) / GIB, has_scorers=has_scorers)


def split_and_compile(transformer: nn.Module, mesh: Mesh, run: DistributedSettings) -> None:
    """Share a transformer's videos among ranks and compile it, before it is placed."""
    parallelize(transformer, mesh, compile=run.enable_compile == "true", is_hooked=True)
