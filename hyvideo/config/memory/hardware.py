"""GPUs and links that a run is planned for."""

from dataclasses import dataclass, field
from typing import Any

# TFLOP/s of an H100 in half precision under its power limit, and TB/s of its memory, estimated from published
# measurements of kernels, such as cuDNN's attention. Other GPUs are assumed to have the same proportions.
H100 = {"products": 580.0, "attention": 580.0, "attention backward": 500.0, "convolutions": 200.0, "memory": 2.6}
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
