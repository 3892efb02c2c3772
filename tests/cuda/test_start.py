"""The trial of attention kernels and the reward thread's device, on a GPU; on a CPU only the code runs."""

import subprocess
import sys

import pytest
import torch

from hyvideo.models import attention_kernels
from hyvideo.models.attention_kernels import BACKENDS, Shape, choose_kernel, problem_of, scaled_dot_product
from tests.conftest import ROOT
from tests.cuda.workload import DEVICE, IS_TINY

pytestmark = pytest.mark.cuda

SCORE = """
import torch
from hyvideo.models.reward_models.async_scorer import AsyncScorer

class Brightness:
    def score(self, videos, prompts, *, fps):
        return [{"VQ": video.to("cuda:1").float().mean().item()} for video in videos]

torch.cuda.set_device(1)
scorer = AsyncScorer({"test": Brightness()}, {"VQ": 1.0}, device=torch.device("cuda", 1))
scorer.measure([torch.zeros(2, 3, 8, 8, dtype=torch.uint8)], [""], fps=8)
print(torch._C._cuda_hasPrimaryContext(0), torch._C._cuda_hasPrimaryContext(1))
scorer.close()
"""


@pytest.fixture
def shape(work):
    sizes, tokens = work.architecture, work.tokens + work.text_tokens
    return Shape(sizes.num_attention_heads, sizes.attention_head_dim, tokens, work.dtype)


@pytest.fixture(autouse=True)
def restored_kernel():
    before = attention_kernels._kernel
    yield
    attention_kernels.use(before)


def test_the_chosen_kernel_computes_the_same_with_and_without_gradient(gpu, shape, record_property):
    choice = choose_kernel("auto", shape, DEVICE)
    record_property("kernel", choice.kernel)
    record_property("rejected", "; ".join(f"{name}: {why}" for name, why in choice.rejected.items()))
    size = 1, shape.heads, shape.tokens, shape.head_dim
    inputs = [torch.randn(size, device=DEVICE, dtype=shape.dtype, requires_grad=True) for _ in range(3)]
    with torch.no_grad():
        sampled = scaled_dot_product(*inputs)
    assert torch.equal(sampled, scaled_dot_product(*inputs))
    assert DEVICE.type == "cpu" or choice.kernel != "torch"


@pytest.mark.parametrize("kernel", ["flash"] if IS_TINY else BACKENDS)
def test_each_kernel_is_tried(gpu, shape, record_property, kernel):
    """Records why a kernel cannot be used."""
    if DEVICE.type == "cuda":
        record_property("problem", problem_of(kernel, shape, DEVICE, with_gradient=True) or "none")


def test_scoring_creates_no_context_on_another_gpu(gpu, record_property):
    """Needs two GPUs."""
    record_property("GPUs", torch.cuda.device_count() if DEVICE.type == "cuda" else 0)
    if DEVICE.type == "cuda" and torch.cuda.device_count() > 1:
        done = subprocess.run([sys.executable, "-c", SCORE], cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.stdout.split() == ["False", "True"], done.stderr
