"""Comparison of our transformer's speed with diffusers' on a CPU, at small width and with the same
random weights.

diffusers gets padded conditions with masks, as from its pipeline; ours gets only the valid text
tokens. Calls alternate; the ratio is the median over consecutive pairs. `tests/cuda/test_speed.py`
measures both on a GPU.
"""

import statistics
from functools import partial

import pytest
import torch

from hyvideo.models.family import install
from tests.cuda.speed import Workload, relative_difference, sample, take_turns, train
from tests.stock_models import stock_twin

CPU = torch.device("cpu")
SMALL = {
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "rope_axes_dim": (16, 24, 24),
}


def compare(run, models, inputs, repeats):
    """Return the largest relative difference of the results, and the median ratio of ours to
    diffusers' seconds.
    """
    calls = {name: partial(run, model, inputs[name]) for name, model in models.items()}
    difference = relative_difference(*(call().float() for call in calls.values()))
    times = take_turns(calls, repeats, CPU)
    return difference, statistics.median(ours / stock for ours, stock in zip(*times.values()))


def benchmark(work, repeats=7):
    """Yield stage, difference and ratio for a forward pass and for a training step with
    recomputation.
    """
    ours = work.transformer()
    models = {"ours": ours, "stock": stock_twin(ours)}
    install(ours)
    inputs = work.inputs(ours)
    yield "forward", *compare(sample, models, inputs, repeats)
    for model in models.values():
        model.enable_gradient_checkpointing()
    yield "training", *compare(train, models, inputs, repeats)


@pytest.mark.slow
def test_our_transformer_is_faster_than_diffusers():
    """Prints both ratios, for 2,000 video tokens and 200 text tokens."""
    for stage, difference, ratio in benchmark(Workload(CPU, torch.float32, SMALL, (5, 20, 20))):
        print(
            f"{stage}: {ratio:.3g} of diffusers' seconds, largest relative difference "
            f"{difference:.1e}"
        )
        assert ratio < 0.7
