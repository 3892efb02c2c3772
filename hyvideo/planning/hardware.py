"""GPUs and links that a run is planned for."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_H100: dict[str, float] = _TABLE["h100"]  # TFLOP/s by kind of kernel
GPUS: dict[str, dict[str, Any]] = _TABLE["gpus"]
_DEFAULT = GPUS["H100"]
_RATES = "gpu_memory", "rate", "bandwidth", "link", "pcie"


def _assumed(value: float, sentence: str) -> Any:
    return field(default=value, metadata={"help": sentence})


@dataclass(frozen=True)
class Hardware:
    """Memory, rates and links of a GPU, assumed; defaults: an H100 or H800 with a 400 Gbit/s
    network card.
    """

    gpu_memory: float = _assumed(_DEFAULT["gpu_memory"], "memory of one GPU in GiB")
    rate: float = _assumed(
        _DEFAULT["rate"],
        "TFLOP/s of one GPU in bf16 matrix products; scales attention and decoding",
    )
    bandwidth: float = _assumed(0.0, "TB/s of one GPU's memory; 0 scales an H100's by the rate")
    gpus_per_node: int = _assumed(8, "GPUs per node")
    link: float = _assumed(_DEFAULT["link"], "GB/s that a GPU receives from other GPUs of its node")
    network: float = _assumed(
        50.0, "GB/s that a node receives from other nodes, per GPU of the node"
    )
    pcie: float = _assumed(_DEFAULT["pcie"], "GB/s of copies between a GPU and pinned host memory")

    @property
    def memory_rate(self) -> float:
        """TB/s of memory-bound kernels."""
        return self.bandwidth or _DEFAULT["bandwidth"] * self.rate / _DEFAULT["rate"]

    @property
    def name(self) -> str:
        """Name of the GPU with these rates; empty if the table has none."""
        rates = self.rate, self.memory_rate
        return next(
            (name for name, gpu in GPUS.items() if (gpu["rate"], gpu["bandwidth"]) == rates), ""
        )

    def seconds(self, kind: str, amount: float) -> float:
        """Return the seconds for an amount of FLOPs, or of bytes that memory-bound kernels read and
        write.
        """
        if kind == "memory":
            return amount / (self.memory_rate * 1e12)
        return amount / (_H100[kind] * 1e12 * self.rate / _H100["products"])

    def copy_seconds(self, size: float) -> float:
        """Return the seconds to copy bytes between a GPU and pinned host memory."""
        return size / (self.pcie * 1e9)


def hardware_of(name: str) -> Hardware:
    """Return the hardware of a GPU by its name in the table or in torch.

    Raises ValueError for an unknown one.
    """
    wanted = _simplified(name)
    for known, gpu in GPUS.items():
        if wanted == _simplified(known) or re.fullmatch(gpu["device"], name):
            return replace(Hardware(), **{key: gpu[key] for key in _RATES})
    raise ValueError(
        f"gpu must be one of {', '.join(GPUS)}, got {name!r}; for another GPU, set "
        "--gpu_memory, and --rate and --bandwidth of scripts.plan"
    )


def hardware_of_device(device_name: str, gpu_memory: float) -> Hardware:
    """Return the hardware of a GPU with torch's name for it; an unknown one counts as an H100."""
    known = hardware_of(device_name) if gpu_rates(device_name)[1] else Hardware()
    return replace(known, gpu_memory=gpu_memory)


def gpu_rates(device_name: str) -> tuple[float, float]:
    """Return the peak and the assumed rate of a GPU, in TFLOP/s; 0 for one that is not in the
    table.
    """
    for gpu in GPUS.values():
        if re.fullmatch(gpu["device"], device_name):
            return gpu["peak"], gpu["rate"]
    return 0.0, 0.0


def _simplified(name: str) -> str:
    """Return the name in lower case, without the maker, spaces and hyphens."""
    return re.sub(r"nvidia|geforce|[\s_-]", "", name.lower())


SLOWER = hardware_of("A100")  # hours are printed for it too
