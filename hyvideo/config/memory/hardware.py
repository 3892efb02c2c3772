"""The GPUs and links that a run is planned for."""

from dataclasses import dataclass, field
from typing import Any


def _assumed(value: float, sentence: str) -> Any:
    return field(default=value, metadata={"help": sentence})


@dataclass(frozen=True)
class Hardware:
    """A GPU's memory, rate and links: those of an H100 or H800 with a card of 400 Gbit/s. Assumed, not measured.

    The rate is half of what matrix products alone reach there.
    """

    gpu_memory: float = _assumed(80.0, "GiB of one GPU")
    rate: float = _assumed(400.0, "TFLOP/s that one GPU reaches")
    gpus_per_node: int = _assumed(8, "GPUs of one node")
    link: float = _assumed(450.0, "GB/s that a GPU receives from the others of its node")
    network: float = _assumed(50.0, "GB/s that a node receives from others, for each of its GPUs")
