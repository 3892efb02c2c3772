"""The way of offloading that generation chooses when none is set."""

import torch

from hyvideo.models.offload import total_bytes
from hyvideo.models.placement import Offloading
from hyvideo.models.sizes import read_architecture
from hyvideo.planning.generation import automatic_way
from hyvideo.planning.memory import GIB
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.config import Config
from hyvideo.settings.sampling import Sampling


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
