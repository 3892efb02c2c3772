"""GPUs and links that a run is planned for."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
H100, GPUS = _TABLE["h100"], _TABLE["gpus"]
SLOWER_RATE = 220.0  # matrix products of an A100; hours are printed for it too


def _assumed(value: float, sentence: str) -> Any:
    return field(default=value, metadata={"help": sentence})


@dataclass(frozen=True)
class Hardware:
    """Memory, rate and links of a GPU, assumed; defaults: an H100 or H800 with a 400 Gbit/s network card."""

    gpu_memory: float = _assumed(80.0, "memory of one GPU in GiB")
    rate: float = _assumed(H100["products"], "TFLOP/s of one GPU in bf16 matrix products; scales all of its rates")
    gpus_per_node: int = _assumed(8, "GPUs per node")
    link: float = _assumed(300.0, "GB/s that a GPU receives from other GPUs of its node")
    network: float = _assumed(50.0, "GB/s that a node receives from other nodes, per GPU of the node")

    def seconds(self, kind: str, amount: float) -> float:
        """Return the seconds for an amount of FLOPs, or of bytes that memory-bound kernels read and write."""
        return amount / (H100[kind] * 1e12 * self.rate / H100["products"])


def gpu_rates(device_name: str) -> tuple[float, float]:
    """Return the peak and the assumed rate of a GPU, in TFLOP/s; 0 for one that is not in the table."""
    peak, rate = next((rates for name, rates in GPUS.items() if re.fullmatch(name, device_name)), (0.0, 0.0))
    return peak, rate
