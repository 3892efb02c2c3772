"""GPUs and links that a run is planned for."""

import re
from dataclasses import dataclass, field
from typing import Any

# TFLOP/s of an H100 in half precision under its power limit, and TB/s of its memory, estimated from published
# measurements of kernels, such as cuDNN's attention. Other GPUs are assumed to have the same proportions.
H100 = {"products": 580.0, "attention": 580.0, "attention backward": 500.0, "convolutions": 200.0, "memory": 2.6}
SLOWER_RATE = 220.0  # matrix products of an A100; hours are printed for it too
# By name of the device in torch: peak TFLOP/s in bf16 and fp16 without sparsity, from NVIDIA's data sheets, and the
# rate of matrix products, assumed from the power limit.
GPUS = {
    r"NVIDIA A[18]00(-SXM4-\d+GB|-PCIE-\d+GB| \d+GB PCIe)": (312.0, SLOWER_RATE),
    r"NVIDIA H100 \d+GB HBM\de?|NVIDIA H800|NVIDIA H200": (989.0, H100["products"]),
    r"NVIDIA H[18]00 PCIe": (756.0, 440.0),
    r"NVIDIA B200": (2250.0, 1300.0),
    r"NVIDIA L40S|NVIDIA RTX 6000 Ada Generation": (362.0, 175.0),
    r"NVIDIA GeForce RTX 4090": (165.0, 125.0),
    r"NVIDIA GeForce RTX 5090": (209.0, 160.0),
}


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
    """Return the peak and the assumed rate of a GPU, in TFLOP/s; 0 for one that is not in the table, such as a part of
    a GPU (MIG)."""
    return next((rates for name, rates in GPUS.items() if re.fullmatch(name, device_name)), (0.0, 0.0))
