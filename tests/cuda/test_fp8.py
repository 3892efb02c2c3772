"""Blocks whose frozen matrices are stored in fp8, with a LoRA, compiled: equal numbers in rollout
and update, speed.
"""

from dataclasses import replace

import pytest
import torch

from hyvideo.models.family import prepare
from hyvideo.models.fp8 import Fp8Linear, use_fp8
from hyvideo.models.lora import add_trainable_lora, training_config
from tests.cuda.speed import forward, sample, seconds_of, train
from tests.cuda.workload import (
    DEVICE,
    IS_TINY,
    arrange,
    cache_modulation,
    median_seconds,
)

pytestmark = pytest.mark.cuda


def test_compiled_fp8_blocks(work, record):
    """Two blocks. Records the first passes, which compile, and then the speed."""
    few = replace(work, sizes=work.sizes | {"num_layers": 1 if IS_TINY else 2})
    model = few.transformer()
    prepare(model, {"text"})
    use_fp8(model)
    add_trainable_lora(model, training_config(model, rank=32, alpha=64.0))
    for module in model.modules():  # after the adapter, as in a run
        if isinstance(module, Fp8Linear):
            module.store(module.weight.detach())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    arrange(model, recompute="selective", compile=True)
    cache_modulation(model)
    inputs = few.inputs(model)["ours"]
    record({"first sampling, s": seconds_of(lambda: sample(model, inputs), DEVICE)})
    record({"first training, s": seconds_of(lambda: train(model, inputs), DEVICE)})
    sampled = sample(model, inputs)
    trained = forward(model, inputs)
    record({"rollout equals update": torch.equal(sampled, trained)})
    record({"sampling, s": median_seconds(lambda: sample(model, inputs), 3)})
    record({"training, s": median_seconds(lambda: train(model, inputs), 3)})
    assert torch.equal(sampled, trained)
