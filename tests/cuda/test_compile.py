"""Compiles the kernels that later checks use, for their shared cache: their time limits do not
cover compilation.
"""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from hyvideo.models.family import prepare
from hyvideo.models.lora import add_trainable_lora, training_config
from tests.cuda.speed import sample, seconds_of, train
from tests.cuda.workload import COMPILE_FAILED, DEVICE, IS_TINY, arrange, cache_modulation

pytestmark = pytest.mark.cuda
# The recipes compile two kinds of blocks: all weights with full, and a LoRA with selective
# activation checkpointing.
CASES = {"all weights": "full", "LoRA": "selective"}


@pytest.mark.parametrize("case", CASES)
def test_compile(work, record, case):
    """Records the seconds of the first and the second pass of two blocks of full width.

    If compilation fails, later checks run eagerly and say so.
    """
    few = replace(work, sizes=work.sizes | {"num_layers": 1 if IS_TINY else 2})
    transformer = few.transformer()
    prepare(transformer, {"text"})
    if case == "LoRA":
        add_trainable_lora(transformer, training_config(transformer, rank=32, alpha=32.0))
    arrange(transformer, recompute=CASES[case], compile=True, traces_on_cpu=True)
    if case == "LoRA":
        cache_modulation(transformer)
    inputs = few.inputs(transformer)["ours"]
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder and case == next(iter(CASES)):
        Path(folder, COMPILE_FAILED).unlink(missing_ok=True)  # of an earlier call
    record({"cache": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "default")).name})
    record({"precision casts": torch._inductor.config.emulate_precision_casts})
    try:
        for name, kind in {"sampling": sample, "training": train}.items():
            for turn in ("first", "second"):
                record(
                    {f"{turn} {name}, s": seconds_of(partial(kind, transformer, inputs), DEVICE)}
                )
    except Exception as error:  # whatever the compiler raises
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, COMPILE_FAILED).write_text(f"{type(error).__name__}: {str(error)[:200]}")
        raise
