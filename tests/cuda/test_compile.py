"""Compiles the kernels that later checks use, for their shared cache: their time limits do not cover compilation."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hyvideo.models.family import prepare
from hyvideo.models.lora import add_trainable_lora, training_config
from tests.cuda.speed import sample, seconds_of, train
from tests.cuda.workload import DEVICE, IS_TINY, arrange

pytestmark = pytest.mark.cuda
CASES = {"selective": "selective"}  # activation checkpointing
CASES |= {} if IS_TINY else {"none": "none", "full": "full", "LoRA": "selective"}


@pytest.mark.parametrize("frames", [2] if IS_TINY else [2, 21])  # of latents, as in test_ratios.py and test_speed.py
@pytest.mark.parametrize("case", CASES)
def test_compile(work, record_property, case, frames):
    """Records the seconds of the first and the second pass of two blocks of full width."""
    few = replace(work, sizes=work.sizes | {"num_layers": 1 if IS_TINY else 2}, grid=(frames, *work.grid[1:]))
    transformer = few.transformer()
    prepare(transformer, {"text"})
    if case == "LoRA":
        add_trainable_lora(transformer, training_config(transformer, rank=32, alpha=32.0))
    arrange(transformer, recompute=CASES[case], compile=True, traces_on_cpu=True)
    inputs = few.inputs(transformer)["ours"]
    for name, kind in {"sampling": sample, "training": train}.items():
        for turn in ("first", "second"):
            record_property(f"{turn} {name}, s", seconds_of(partial(kind, transformer, inputs), DEVICE))
    record_property("cache", Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "default")).name)
