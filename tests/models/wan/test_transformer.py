"""Tests that Wan's forward pass matches diffusers' and rejects inputs that the model was not
trained for.
"""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from hyvideo.distributed.parallelize import parallelize
from hyvideo.models.conditions import Condition
from hyvideo.models.family import new_model
from hyvideo.models.lora import add_trainable_lora, training_config
from tests.models.wan.tiny import (
    FAMILY,
    SIZES,
    distance,
    gradients,
    inputs,
    installed,
)
from tests.stock_models import stock_inputs, stock_twin


def relative(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def test_the_bf16_velocity_is_as_accurate_as_diffusers():
    stock_error = error = 0.0
    for seed in range(6):
        ours = installed(seed, num_layers=4, attention_head_dim=48, ffn_dim=512)
        arguments = inputs(1, seed=seed)
        stock_arguments = stock_inputs(ours, **arguments)
        with torch.no_grad():
            exact = ours(**arguments)
            with torch.autocast("cpu", torch.bfloat16):
                stock_error += (stock_twin(ours)(**stock_arguments)[0] - exact).square().mean()
                error += (ours(**arguments) - exact).square().mean()
    assert error <= 1.05 * stock_error


@pytest.mark.parametrize(
    "lengths, computed",
    [((512,), 512), ((511,), 512), ((512, 3), 512), ((40, 3), 41), ((1,), 2), ((0, 2), 3)],
)
def test_texts_and_one_padding_token_are_computed_and_the_velocity_equals_diffusers(
    lengths, computed
):
    ours, arguments = installed(), inputs(len(lengths))
    arguments["conditions"] = [Condition(torch.randn(length, 32)) for length in lengths]
    rows = []
    for block in ours.blocks:
        block.attn2.to_k.register_forward_hook(lambda layer, args, keys: rows.append(keys.shape[1]))
    with torch.no_grad():
        expected = stock_twin(ours)(**stock_inputs(ours, **arguments))[0]
        assert relative(ours(**arguments), expected) <= 2e-6
    assert rows == [computed] * len(ours.blocks)


def test_the_time_embedding_is_float32_in_a_bf16_model_and_under_autocast():
    model, arguments = installed().bfloat16(), inputs(1)
    exact = copy.deepcopy(model).float()
    texts = [Condition(condition.text.bfloat16()) for condition in arguments["conditions"]]
    found = []
    for each in (model, exact):
        each.blocks[0].register_forward_pre_hook(lambda block, args: found.append(args[2]))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            each(**arguments | {"conditions": texts})
    assert found[0].dtype == torch.float32 and torch.equal(*found)


def test_an_adapter_of_the_time_embedder_has_an_effect():
    model, arguments = installed(), inputs(1)
    add_trainable_lora(
        model,
        training_config(model, rank=2, alpha=2.0, targets=["time_proj", "time_embedder.linear_1"]),
    )
    before = model(**arguments)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.1)
    after = model(**arguments)
    assert not torch.allclose(after, before)
    after.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if ".lora_" in name)


def test_a_transformer_of_wan21_image_to_video_raises_an_error():
    with pytest.raises(ValueError, match="image-to-video"):
        new_model(FAMILY.transformer, SIZES | {"image_dim": 8, "added_kv_proj_dim": 72})


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute, backend",
    [
        ("selective", "eager"),
        ("none", "aot_eager"),
    ],
)
def test_all_compiled_blocks_share_one_graph_without_breaks(mesh, recompute, backend):
    torch._dynamo.reset()
    counters.clear()
    plain, model = installed(num_layers=3), installed(num_layers=3)
    parallelize(model, mesh, compile=True, compile_backend=backend, recompute=recompute)
    for grid in ((3, 6, 4), (2, 4, 6)):
        arguments = inputs(1, grid)
        with torch.no_grad():
            torch.testing.assert_close(model(**arguments), plain(**arguments))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert distance(gradients(model, **arguments), gradients(plain, **arguments)) <= 2e-6
    # with and without gradients
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    torch._dynamo.reset()
