"""GPUs that a run is planned for: those of hardware.yaml and, in its format, of a file that
scripts.gpu_check has measured.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
GPUS: dict[str, dict[str, Any]] = _TABLE["gpus"]
MEASURED = "GPU_HARDWARE_FILE"  # environment variable: hardware.yaml of scripts.gpu_check


@dataclass(frozen=True)
class Hardware:
    """A GPU and its links; ``hardware.yaml`` explains the numbers. The defaults are an H100's."""

    name: str = "H100"
    peak: float = GPUS["H100"]["peak"]
    rate: float = GPUS["H100"]["rate"]
    bandwidth: float = GPUS["H100"]["bandwidth"]
    gpu_memory: float = GPUS["H100"]["gpu_memory"]
    link: float = GPUS["H100"]["link"]
    host_link: float = GPUS["H100"]["host_link"]
    gpus_per_node: int = 8
    network: float = 50.0  # GB/s from other nodes, per GPU: a card of 400 Gbit/s for each


def hardware_of(name: str) -> Hardware:
    """Return the hardware of a GPU by its name in the table or in torch.

    Raises ValueError for an unknown one.
    """
    known = _find(name)
    if known is None:
        raise ValueError(
            f"gpu must be one of {', '.join(GPUS)}, got {name!r}; for another GPU, use the most "
            "similar one with --gpu_memory"
        )
    return known


def hardware_of_device(device_name: str, gpu_memory: float) -> Hardware:
    """Return the hardware of a GPU with torch's name for it; of an unknown one, only the memory is
    known.
    """
    known = _find(device_name) or Hardware(name="", peak=0.0, rate=0.0, bandwidth=0.0)
    return replace(known, gpu_memory=gpu_memory)


def assumed_hardware() -> Hardware:
    """Return the hardware for a plan that names no GPU: the measured one, or else an H100.

    Raises ValueError if there is no file with the measured one.
    """
    return hardware_of(next(iter(_measured()), "H100"))


def _find(name: str) -> Hardware | None:
    wanted = _simplified(name)
    measured = _measured()
    others = {known: gpu for known, gpu in GPUS.items() if known not in measured}
    for known, gpu in (measured | others).items():
        if wanted == _simplified(known) or re.fullmatch(gpu["device"], name):
            numbers = {key: value for key, value in gpu.items() if key != "device"}
            return Hardware(name=known, **numbers)
    return None


def _measured() -> dict[str, dict[str, Any]]:
    """Return the GPU that scripts.gpu_check has measured, in the format of hardware.yaml."""
    file = os.environ.get(MEASURED)
    if not file:
        return {}
    if not Path(file).is_file():
        raise ValueError(
            f"{MEASURED} must be the hardware.yaml of scripts.gpu_check, got {file!r}: not found"
        )
    return yaml.safe_load(Path(file).read_text(encoding="utf-8"))["gpus"]


def _simplified(name: str) -> str:
    """Return the name in lower case, without the maker, the series, spaces and hyphens."""
    return re.sub(r"nvidia|geforce|rtx|[\s_-]", "", name.lower())
