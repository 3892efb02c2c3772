"""Attention at the sizes of the recipes: the trial of each kernel, equal outputs, gradients, and
speed.
"""

from functools import partial

import pytest
import torch

from hyvideo.models import attention_kernels
from hyvideo.models.attention_kernels import (
    Shape,
    choose_kernel,
    scaled_dot_product,
)
from tests.cuda.recipes import Attention, attentions
from tests.cuda.speed import relative_difference
from tests.cuda.workload import DEVICE, IS_TINY, KERNELS, median_seconds, only, profiled_kernel

pytestmark = pytest.mark.cuda
SIZES = {"60": Attention(2, 16, 60, True)} if IS_TINY else attentions()
TRAINED = {name: size for name, size in SIZES.items() if size.is_trained}


@pytest.fixture(autouse=True)
def restored_kernel():
    before = attention_kernels._kernel
    yield
    attention_kernels.use(before)


def shape_of(size):
    return Shape(size.heads, size.head_dim, size.tokens, torch.bfloat16)


def random_inputs(size):
    tokens = 3, 1, size.heads, size.tokens, size.head_dim
    inputs = torch.randn(tokens, dtype=torch.bfloat16, device=DEVICE)
    return [part.requires_grad_() for part in inputs]


@pytest.mark.parametrize("tokens", TRAINED)
def test_the_chosen_kernel_has_equal_outputs_and_correct_gradients(gpu, record, tokens):
    """Outputs with and without gradient are compared bit for bit, gradients with FlashAttention
    2's.
    """
    size = TRAINED[tokens]
    choice = choose_kernel("auto", shape_of(size), DEVICE)
    record({"kernel": choice.kernel})
    record({"rejected": "; ".join(f"{name}: {why}" for name, why in choice.rejected.items())})
    inputs = random_inputs(size)
    with torch.no_grad():
        sampled = scaled_dot_product(*inputs)
    trained = scaled_dot_product(*inputs)
    assert torch.equal(sampled, trained)
    upstream = torch.randn_like(trained)
    ours = torch.autograd.grad(trained, inputs, upstream)
    with only("flash" if DEVICE.type == "cuda" else "default"):
        theirs = torch.autograd.grad(scaled_dot_product(*inputs), inputs, upstream)
    for name, gradient, reference in zip(("query", "key", "value"), ours, theirs):
        difference = relative_difference(gradient.float(), reference.float())
        record({f"difference of the gradient of {name}": difference})
        assert gradient.isfinite().all() and difference < 2e-2
    assert DEVICE.type == "cpu" or choice.kernel != "torch"


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_speed(gpu, record, kernel, tokens):
    """Records the profiled kernel and its speed; of attention that is only sampled, the forward
    pass.
    """
    size = SIZES[tokens]
    inputs = random_inputs(size)
    flops = 4 * size.tokens**2 * size.heads * size.head_dim / 1e12
    with only(kernel):
        forward = torch.no_grad()(partial(scaled_dot_product, *inputs))
        record({"kernel": profiled_kernel(forward)})
        record({"TFLOP/s": flops / median_seconds(forward, 5)})
        if size.is_trained:
            upstream = torch.randn_like(inputs[0])
            output = scaled_dot_product(*inputs)
            backward = partial(torch.autograd.grad, output, inputs, upstream, retain_graph=True)
            record({"TFLOP/s backward": 2.5 * flops / median_seconds(backward, 3)})
