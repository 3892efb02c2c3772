"""GPUs and links that a run is planned for."""

from dataclasses import dataclass, field
from typing import Any

SLOWER_RATE = 150.0  # TFLOP/s of an A100; hours are printed for it too


def _assumed(value: float, sentence: str) -> Any:
    return field(default=value, metadata={"help": sentence})


@dataclass(frozen=True)
class Hardware:
    """Memory, rate and links of a GPU; defaults: an H100 or H800 with a 400 Gbit/s network card, assumed, not measured.

    The rate is half of what matrix products alone reach on it.
    """

    gpu_memory: float = _assumed(80.0, "memory of one GPU in GiB")
    rate: float = _assumed(400.0, "TFLOP/s that one GPU reaches")
    gpus_per_node: int = _assumed(8, "GPUs per node")
    link: float = _assumed(450.0, "GB/s that a GPU receives from other GPUs of its node")
    network: float = _assumed(50.0, "GB/s that a node receives from other nodes, per GPU of the node")
