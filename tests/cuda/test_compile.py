"""Compilation of the blocks of HunyuanVideo-1.5, whose kernels stay in torch's cache for later tests."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from hyvideo.models.family import prepare
from hyvideo.models.lora import add_trainable_lora, training_config
from tests.cuda.speed import sample, seconds_of, train
from tests.cuda.workload import DEVICE, IS_TINY, arrange, cache_modulation

pytestmark = pytest.mark.cuda
# The recipes compile two kinds of blocks: all weights with full, and a LoRA with selective
# activation checkpointing.
CASES = {"all weights": "full", "LoRA": "selective"}


@pytest.mark.parametrize("case", CASES)
def test_compile(work, record, case):
    """Records the seconds of the first and the second pass of two blocks of full width."""
    few = replace(work, sizes=work.sizes | {"num_layers": 1 if IS_TINY else 2})
    transformer = few.transformer()
    prepare(transformer, {"text"})
    if case == "LoRA":
        add_trainable_lora(transformer, training_config(transformer, rank=32, alpha=32.0))
    arrange(transformer, recompute=CASES[case], compile=True, traces_on_cpu=True)
    if case == "LoRA":
        cache_modulation(transformer)
    inputs = few.inputs(transformer)["ours"]
    record({"precision casts": torch._inductor.config.emulate_precision_casts})
    for name, kind in {"sampling": sample, "training": train}.items():
        for turn in ("first", "second"):
            seconds = seconds_of(partial(kind, transformer, inputs), DEVICE)
            record({f"{turn} {name}, s": seconds})
