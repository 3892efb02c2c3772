"""Settings that depend on the machine, and checks for missing files, packages and GPUs (used by
--print_config).
"""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from hyvideo.checks.machine_rules import machine_problems
from hyvideo.distributed.collectives import all_objects
from hyvideo.distributed.mesh import Mesh
from hyvideo.files.files import find_path, folder_problem
from hyvideo.loading.gpu_driver import cudnn_problem, driver_problem
from hyvideo.loading.model_setup import check_checkpoint
from hyvideo.models.offload import total_bytes
from hyvideo.models.sizes import read_architecture
from hyvideo.planning.hardware import Hardware
from hyvideo.planning.memory import GIB
from hyvideo.planning.memory import resolve_auto as resolve_checkpointing
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.rewards.rewards import SCORERS
from hyvideo.settings.config import Config
from hyvideo.settings.reward_settings import reward_options
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.settings.sections import DistributedSettings


def resolve_auto(config: Config, mesh: Mesh, device: torch.device) -> Config:
    """Return the settings with every ``auto`` replaced by its value on this ``device``.

    Checkpointing follows the smallest GPU, since ranks that share a video must run the same
    collectives when they recompute.
    """
    if device.type != "cuda":
        return config.resolve_auto(on_gpu=False)
    smallest, recompute = min(all_objects(gpu_memory(device), mesh)), "full"
    with suppress(ValueError):  # an unusable transformer is reported when it is loaded
        architecture = read_architecture(
            config.model.pretrained_model_root, config.model.transformer_version
        )
        run = PlannedRun(
            config, mesh.world_size, architecture, hardware=Hardware(gpu_memory=smallest)
        )
        recompute = resolve_checkpointing(run).settings.activation_checkpointing
    config = config.resolve_auto(on_gpu=True, recompute=recompute)
    check_compiler(config.distributed)
    return config


def check_compiler(distributed: DistributedSettings) -> None:
    """Raise ValueError if blocks are compiled and this machine lacks what that needs."""
    if distributed.enable_compile != "true":
        return
    missing = []
    compilers = (os.environ.get("CC") or "cc", "gcc", "clang")
    if not any(map(shutil.which, compilers)):
        missing.append("a C compiler (install gcc, or set the variable CC)")
    # included by the code that Triton compiles
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        missing.append(f"{header} (install python3-dev)")
    if missing:
        names = " and ".join(missing)
        raise ValueError(f"enable_compile needs {names}; or set enable_compile false")


def gpu_memory(device: torch.device) -> float:
    """Return the memory of a GPU that this process may use, in GiB; 0 for a CPU."""
    return total_bytes(device) / GIB


def device_name(device: torch.device) -> str:
    """Return torch's name of a GPU; ``the CPU`` for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def missing_requirements(inputs: RunInputs) -> Iterator[str]:
    """Yield a message for each package, file, disk space and GPU that a run lacks."""
    config = inputs.config
    reported = list(machine_problems(inputs))
    yield from reported
    machine = [gpu_problem(config.model.device, inputs.world_size)]
    if config.model.device != "cpu":
        machine.append(cudnn_problem())
    yield from filter(None, machine)
    root = config.model.pretrained_model_root
    if folder_problem(root):
        return
    named = {"prompts_csv": config.data.prompts_csv, "valid_video_csv": config.data.valid_video_csv}
    existing = {
        name: [path for path in paths if os.path.isfile(find_path(path))]
        for name, paths in named.items()
    }
    try:
        requests = {name: inputs.files.read(paths) for name, paths in existing.items()}
        if config.objective.videos_from:
            requests[config.objective.videos_from] = inputs.prompts
        check_checkpoint(config, requests, list(config.video_sizes.values()))
    except ValueError as error:
        yield from (line for line in str(error).splitlines() if line not in reported)
    options = reward_options(config.reward)
    for name in config.reward.scorers:
        if name not in SCORERS:
            continue  # a class of the user's, which knows its files
        folder = options[name].get("path", Path(root) / SCORERS[name].folder)
        problem = folder_problem(folder)
        if problem:
            yield f"the files of reward_model {name} in {folder}: {problem}"


def gpu_problem(device: str, world_size: int) -> str | None:
    """Return a message if this machine has fewer usable GPUs than processes that need one, else
    None.
    """
    if device == "cpu":
        return None
    problem = driver_problem()
    if problem:
        return problem
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    gpus = torch.cuda.device_count()
    if gpus >= num_local:
        return None
    fallback = "; device auto would use the CPU" if device == "auto" and gpus == 0 else ""
    return f"each process needs a GPU: needed {num_local}, found {gpus}{fallback}"
