"""What this machine lacks for a run, in sentences: a run refuses it, and --print_config tells it and ends well."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from hyvideo.config.command_line import reward_options
from hyvideo.config.machine_rules import machine_problems
from hyvideo.config.memory.hardware import Hardware
from hyvideo.config.memory.phases import GIB
from hyvideo.config.memory.phases import settled as recomputation
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.settings import Config
from hyvideo.data.outside import folder_problem, located
from hyvideo.data.prompts import read_requests
from hyvideo.distributed.collectives import all_objects
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.reward_models.rewards import SCORERS
from hyvideo.models.sizes import read_architecture
from hyvideo.training.model_setup import check_checkpoint


def settled(config: Config, mesh: Mesh, device: torch.device) -> Config:
    """A copy of the settings in which what is left to the machine (``auto``) has its value on this ``device``.

    Recomputation is that of the smallest GPU, on all ranks: ranks that share a video meet again where they recompute.
    """
    if device.type != "cuda":
        return config.settled(on_gpu=False)
    smallest, recompute = min(all_objects(gpu_memory(device), mesh)), "full"
    with suppress(ValueError):  # of a transformer that cannot be used, which is refused when it is read
        architecture = read_architecture(config.model.pretrained_model_root, config.model.transformer_version)
        run = PlannedRun(config, mesh.world_size, architecture, hardware=Hardware(gpu_memory=smallest))
        recompute = recomputation(run).settings.activation_checkpointing
    config = config.settled(on_gpu=True, recompute=recompute)
    distributed, compilers = config.distributed, (os.environ.get("CC") or "cc", "gcc", "clang")
    builds = distributed.enable_compile == "true" and distributed.compile_backend == "inductor"
    if builds and not any(map(shutil.which, compilers)):
        raise ValueError(
            "enable_compile, the default on a GPU, builds kernels with a C compiler, and there is none: install gcc, "
            "name one by CC, or set enable_compile false"
        )
    return config


def gpu_memory(device: torch.device) -> float:
    """GiB of a GPU; 0 for a CPU, of which no plan asks."""
    return torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else 0.0


def lacks(config: Config, world_size: int) -> Iterator[str]:
    """Packages, files, room and GPUs that a run of ``world_size`` processes would not find here."""
    yield from machine_problems(config.model, config.data, config.optimizer, config.record)
    if problem := gpu_problem(config.model.device, world_size):
        yield problem
    root = config.model.pretrained_model_root
    if folder_problem(root):
        return
    named = {"prompts_csv": config.data.prompts_csv, "valid_video_csv": config.data.valid_video_csv}
    there = {name: [path for path in paths if os.path.isfile(located(path))] for name, paths in named.items()}
    try:
        check_checkpoint(
            config, {name: read_requests(*paths) for name, paths in there.items()}, [*config.video_sizes.values()]
        )
    except ValueError as error:
        yield from str(error).splitlines()
    for name, options in ({} if config.reward.remote_reward_url else reward_options(config.reward)).items():
        folder = options.get("path", Path(root) / SCORERS[name].folder) if name in SCORERS else root
        if problem := folder_problem(folder):
            yield f"the files of reward_model {name} in {folder}: {problem}"


def gpu_problem(device: str, world_size: int) -> str | None:
    """The reason why the processes that run on this machine have no GPU each, None where they have or need none."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    gpus = torch.cuda.device_count()
    if device == "cpu" or gpus >= here:
        return None
    otherwise = "; device auto takes the CPU then" if device == "auto" and gpus == 0 else ""
    return f"a GPU for each process: there are {gpus} GPUs and {here} processes{otherwise}"
