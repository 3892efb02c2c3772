"""Settings that depend on the machine."""

import os
import shutil
import sysconfig
from contextlib import suppress
from pathlib import Path

import torch

from hyvideo.distributed.collectives import all_objects
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.offload import total_bytes
from hyvideo.models.sizes import read_architecture
from hyvideo.planning.hardware import Hardware
from hyvideo.planning.memory import GIB
from hyvideo.planning.memory import resolve_auto as resolve_checkpointing
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.config import Config
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
