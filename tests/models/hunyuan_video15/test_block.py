import copy
import types

import pytest
import torch
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock

from hyvideo.models.attention import Layout, WholeSequence
from hyvideo.models.hunyuan_video15 import block
from hyvideo.models.hunyuan_video15.transformer import rotary_tables

GRID, HEADS, WIDTH, TEXT = (2, 3, 4), 2, 32, 5


def blocks():
    """Return diffusers' block and this project's, with the same weights."""
    torch.manual_seed(0)
    stock = HunyuanVideo15TransformerBlock(HEADS, WIDTH // HEADS, mlp_ratio=2.0)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.shape == (WIDTH // HEADS,)), std=0.2)
    ours = copy.deepcopy(stock)
    ours.attn.sequence = WholeSequence()
    ours.attn.forward = types.MethodType(block.attention, ours.attn)
    ours.forward = types.MethodType(block.forward, ours)
    return stock, ours


def tables():
    """Return cos and sin in diffusers' convention and in that of `Layout`."""
    cos, sin = rotary_tables(GRID, (4, 6, 6), 256.0, torch.device("cpu"))
    return (cos, sin.where(torch.arange(len(cos[0])) % 2 > 0, -sin)), (cos, sin)


@pytest.mark.parametrize("batch", [1, 2])
def test_block_outputs_and_gradients_match_diffusers(batch):
    stock, ours = blocks()
    theirs, signed = tables()
    tokens = len(theirs[0])
    inputs = [torch.randn(batch, *shape) for shape in ((tokens, WIDTH), (TEXT, WIDTH), (WIDTH,))]
    layout = Layout(*signed, (TEXT,) * batch, tokens)
    found = []
    for each, last in ((stock, (torch.ones(batch, TEXT), theirs)), (ours, (layout,))):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = each(*leaves, *last)
        loss = sum((part * torch.linspace(-1, 1, part.numel()).view_as(part)).sum() for part in out)
        keys = [name for name, _ in each.named_parameters()]
        variables = [*leaves, *each.parameters()]
        found.append(
            (out, dict(zip(["image", "text", "time", *keys], torch.autograd.grad(loss, variables))))
        )
    (expected, gradients), (out, actual) = found
    for ours_part, part in zip(out, expected):
        assert (ours_part - part).abs().max() <= 2e-6 * part.abs().max()
    scale = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert (actual[name] - gradient).abs().max() <= 2e-6 * scale, name


def test_a_bf16_block_is_as_accurate_as_diffusers():
    batch = 2
    stock, ours = blocks()
    theirs, signed = tables()
    tokens = len(theirs[0])
    inputs = [torch.randn(batch, *shape) for shape in ((tokens, WIDTH), (TEXT, WIDTH), (WIDTH,))]
    mask, layout = torch.ones(batch, TEXT), Layout(*signed, (TEXT,) * batch, tokens)
    with torch.no_grad():
        exact = stock(*inputs, mask, theirs)[0]
        rounded = [tensor.bfloat16() for tensor in inputs]
        with torch.autocast("cpu", torch.bfloat16):
            expected, actual = stock(*rounded, mask, theirs)[0], ours(*rounded, layout)[0]
    assert actual.dtype == torch.bfloat16
    assert (actual - exact).square().mean() <= 1.5 * (expected - exact).square().mean()
