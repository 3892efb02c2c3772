"""Latents that programs store between two stages, so that a repeated command samples only those
that are missing.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hyvideo.files.files import publish


@dataclass(frozen=True)
class Sampled:
    """Final latents, and what the JSON file of the video records of the candidates of best of n."""

    latents: Tensor  # (batch, channels, frames, height, width)
    record: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None  # why none of the candidates could be chosen


def stored(file: Path, key: str, sample: Callable[[], Sampled]) -> Sampled:
    """Return what an interrupted command has stored in ``file``, or sample and store it.

    ``key`` is a digest of all that the latents depend on: a file with another one is replaced.
    """
    if file.is_file():
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
            if metadata["key"] == key:
                return Sampled(opened.get_tensor("latents"), *json.loads(metadata["record"]))
    sampled = sample()
    metadata = {"key": key, "record": json.dumps([sampled.record, sampled.problem])}
    with publish(file) as hidden:
        save_file({"latents": sampled.latents.contiguous()}, hidden, metadata=metadata)
    return sampled
