"""Tests of the order of attention kernels for each GPU, and of the profiled kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from hyvideo.models.attention_kernels import kernel_order, profiled_attention_kernel, set_order, use_fastest_kernels

CUDNN, FLASH, EFFICIENT, MATH = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


@pytest.mark.parametrize(
    "capability, cudnn, has_fa3, order",
    [
        ((9, 0), 91501, False, [CUDNN, FLASH, EFFICIENT, MATH]),
        ((9, 0), 92000, True, [FLASH, CUDNN, EFFICIENT, MATH]),
        ((9, 0), 91500, False, [FLASH, CUDNN, EFFICIENT, MATH]),  # this version's backward pass is wrong
        ((9, 0), 0, False, [FLASH, CUDNN, EFFICIENT, MATH]),
        ((8, 0), 92000, False, []),
        ((10, 0), 92000, False, []),
    ],
)
def test_cudnn_is_first_on_hopper_if_it_is_recent_and_flash_attention_3_is_missing(capability, cudnn, has_fa3, order):
    assert kernel_order(capability, cudnn, has_fa3=has_fa3) == order


def test_set_order_affects_the_process_and_keeps_all_kernels():
    before = torch._C._get_sdp_priority_order()
    try:
        set_order([CUDNN, FLASH, EFFICIENT, MATH])
        F.scaled_dot_product_attention(*torch.zeros(3, 1, 1, 4, 8))
        after = torch._C._get_sdp_priority_order()
        assert after[:4] == [int(kernel) for kernel in (CUDNN, FLASH, EFFICIENT, MATH)]
        assert sorted(after) == sorted(before)
    finally:
        torch._C._set_sdp_priority_order(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_torch_chooses_the_kernel_without_a_gpu():
    before = torch._C._get_sdp_priority_order()
    assert use_fastest_kernels() == "torch" and torch._C._get_sdp_priority_order() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_profiled_kernel_is_the_one_that_ran(dtype):
    cpu = torch.device("cpu")
    fused = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert profiled_attention_kernel(cpu, dtype, heads=4, head_dim=16, tokens=40) == fused
    with torch.nn.attention.sdpa_kernel(MATH):
        unfused = profiled_attention_kernel(cpu, dtype, heads=4, head_dim=16, tokens=40)
    assert unfused == "aten::_scaled_dot_product_attention_math"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_profiled_kernel_on_hopper_is_the_first_in_the_order():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    name = use_fastest_kernels()
    kernel = profiled_attention_kernel(torch.device("cuda"), torch.bfloat16, heads=16, head_dim=128, tokens=1000)
    assert {"cuDNN": "cudnn", "FlashAttention": "flash", "FlashAttention 3": "flash"}[name] in kernel.lower()
