"""scripts.benchmark compares equal computations, in turns."""

import pytest
import torch

from hyvideo.models.family import family_named
from scripts.benchmark import compare, take_turns
from tests.cuda.speed import Workload

CPU = torch.device("cpu")
SIZES = {
    "hunyuan_video15": {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "rope_axes_dim": (8, 12, 12),
        "num_refiner_layers": 1,
        "text_embed_dim": 64,
        "image_embed_dim": 24,
    },
    "wan": {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "ffn_dim": 96,
        "text_dim": 64,
    },
}


@pytest.mark.parametrize("family", SIZES)
def test_both_models_compute_the_same_velocity_and_gradient(family):
    work = Workload(
        CPU, torch.float32, SIZES[family], (2, 4, 6), text_tokens=11, family=family_named(family)
    )
    comparisons = compare(work, num_pairs=1)
    assert list(comparisons) == ["forward", "with gradient"]
    for comparison in comparisons.values():
        assert 0 < comparison.difference <= 1e-5
        assert comparison.ours[0] > 0 and comparison.diffusers[0] > 0


def test_the_order_changes_with_each_pair():
    order = []

    def call(name, value):
        order.append(name)
        return torch.tensor([value])

    found = take_turns(
        {"ours": lambda: call("ours", 1.5), "stock": lambda: call("stock", 2.0)}, 2, CPU
    )
    assert order == ["ours", "stock"] + ["ours", "stock", "stock", "ours"]
    assert found.difference == 0.25
