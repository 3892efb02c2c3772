"""Tests of the choice of the attention kernel: candidates of each GPU, their trial, and the
agreement of ranks.
"""

import importlib.util
import re

import pytest
import torch
import torch.nn.functional as F

from hyvideo.models import attention_kernels
from hyvideo.models.attention_kernels import (
    BACKENDS,
    Choice,
    Shape,
    candidates,
    choose_kernel,
    fits_cudnn,
    problem_of,
    scaled_dot_product,
    use,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SMALL = Shape(heads=2, head_dim=16, tokens=40, dtype=torch.float32)


@pytest.fixture(autouse=True)
def order():
    """The order of torch's kernels, restored after the test."""
    before = torch._C._get_sdp_priority_order()
    yield before
    use("torch")
    torch._C._set_sdp_priority_order(before)


@pytest.mark.parametrize(
    "capability, cudnn, has_fa3, names",
    [
        ((9, 0), 91501, False, ["cudnn", "flash", "efficient"]),
        ((9, 0), 92000, True, ["flash3", "cudnn", "flash", "efficient"]),
        ((9, 0), 91500, False, ["flash", "efficient"]),  # this version's backward pass is wrong
        ((8, 0), 92000, True, ["flash", "efficient"]),
        ((10, 0), 92000, True, ["cudnn", "flash", "efficient"]),
        ((10, 3), 92000, False, ["cudnn", "flash", "efficient"]),
        ((12, 0), 92000, False, ["flash", "efficient"]),
    ],
)
def test_candidates_depend_on_the_gpu_the_version_of_cudnn_and_flash_attention_3(
    monkeypatch, capability, cudnn, has_fa3, names
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found" if has_fa3 else None)
    assert candidates("auto", GPU) == names
    assert (
        candidates("efficient", GPU) == ["efficient"]
        and candidates("torch", GPU) == candidates("auto", CPU) == []
    )


def test_a_trial_runs_the_kernel_and_names_what_is_missing():
    def problem(kernel):
        return problem_of(kernel, SMALL, CPU, with_gradient=True)

    assert problem("flash") is None
    assert "torch.float32" in problem("efficient")
    assert "flash_attn_interface" in problem("flash3")
    assert torch.nn.attention.current_flash_attention_impl() is None


def fails_without_gradient(query, key, value):
    if not torch.is_grad_enabled():
        raise TypeError("fwd() takes 12 positional arguments but 34 were given\nand a second line")
    return stock_attention(query, key, value)


def depends_on_the_mode(query, key, value):
    return stock_attention(query, key, value) * (1 + 1e-6 * torch.is_grad_enabled())


def changed_gradient(change):
    """Return attention whose gradient is changed, without a change of its output."""

    def attend(query, key, value):
        attended = stock_attention(query, key, value)
        if attended.requires_grad:
            attended.register_hook(lambda gradient: change(gradient))
        return attended

    return attend


def wrong_at_64_of_128(gradient):
    return gradient * (torch.nan if gradient.shape[2] % 128 == 64 else 1.0)


def is_nan(query, key, value):
    return stock_attention(query, key, value) * torch.nan


stock_attention = F.scaled_dot_product_attention


@pytest.fixture
def kernels(monkeypatch):
    """A function that replaces kernels by functions; the others are torch's attention on
    the CPU.
    """

    def replace(**functions):
        def attend(query, key, value):
            return functions.get(attention_kernels._kernel, stock_attention)(query, key, value)

        monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
        supported = lambda *inputs: BACKENDS[attention_kernels._kernel].value  # noqa: E731
        monkeypatch.setattr(torch, "_fused_sdp_choice", supported)
        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: None)
        names = lambda setting, device: [*BACKENDS] if setting == "auto" else [setting]  # noqa: E731
        monkeypatch.setattr(attention_kernels, "candidates", names)

    return replace


def test_the_first_kernel_that_works_and_agrees_with_and_without_gradient_is_used(kernels):
    kernels(flash3=fails_without_gradient, cudnn=depends_on_the_mode)
    kernel, rejected = choose_kernel("auto", SMALL, CPU)
    assert kernel == attention_kernels._kernel == "flash"
    assert rejected == {
        "flash3": "TypeError: fwd() takes 12 positional arguments but 34 were given",
        "cudnn": "its outputs with and without gradient differ",
    }
    assert torch._C._get_sdp_priority_order()[0] == BACKENDS["flash"].value
    # for sampling alone
    assert choose_kernel("auto", SMALL, CPU, with_gradient=False).kernel == "cudnn"


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda gradient: gradient * torch.inf, "its gradients for 40 tokens contain NaN or inf"),
        (wrong_at_64_of_128, "its gradients for 64 tokens contain NaN or inf"),
        (
            lambda gradient: gradient * 1.02,
            "its gradient of the query for 40 tokens differs from FlashAttention's by 2 %",
        ),
        (lambda gradient: gradient * 1.005, None),
    ],
)
def test_a_kernel_with_wrong_gradients_is_rejected_unless_only_sampling_uses_it(
    kernels, change, problem
):
    kernels(cudnn=changed_gradient(change))
    found = problem_of("cudnn", SMALL, CPU, with_gradient=True)
    assert found is None if problem is None else re.match(problem, found)
    assert attention_kernels._kernel == "cudnn"  # not that of the comparison
    assert problem_of("cudnn", SMALL, CPU, with_gradient=False) is None


@pytest.mark.parametrize(
    "head_dim, num_queries, num_keys, dtype, fits",
    [
        (128, 40, 40, torch.bfloat16, True),
        (128, 40, 40, torch.float32, False),
        (136, 40, 40, torch.bfloat16, False),
        (128, 40, 1, torch.bfloat16, False),
    ],
)
def test_cudnn_is_called_directly_only_for_inputs_that_it_supports(
    head_dim, num_queries, num_keys, dtype, fits
):
    query, key = (
        torch.empty(1, 2, number, head_dim, dtype=dtype) for number in (num_queries, num_keys)
    )
    assert fits_cudnn(query, key) == fits


def test_a_named_kernel_is_used_or_the_run_stops_before_it_loads_anything(kernels):
    kernels(cudnn=depends_on_the_mode, efficient=is_nan)
    assert choose_kernel("flash", SMALL, CPU) == Choice("flash", {})
    with pytest.raises(ValueError, match="attention_kernel cudnn"):
        choose_kernel("cudnn", SMALL, CPU)
    with pytest.raises(ValueError, match="attention_kernel efficient"):
        choose_kernel("efficient", SMALL, CPU)


def test_all_ranks_use_the_same_kernel(kernels):
    kernels()
    works = dict.fromkeys(BACKENDS)
    without_fa3 = {name: None for name in works if name != "flash3"}
    old = works | {"cudnn": "outputs differ"}
    kernel, rejected = choose_kernel(
        "auto", SMALL, CPU, gather=lambda found: [found, without_fa3, old]
    )
    assert kernel == attention_kernels._kernel == "flash"
    assert rejected == {"flash3": "another rank does not have it", "cudnn": "outputs differ"}
    broken, before = dict.fromkeys(works, "broken"), torch._C._get_sdp_priority_order()
    kernel, rejected = choose_kernel("auto", SMALL, CPU, gather=lambda found: [found, broken])
    assert kernel == attention_kernels._kernel == "torch" and rejected == broken
    assert torch._C._get_sdp_priority_order() == before  # not that of the last trial


def test_on_a_cpu_and_in_float32_every_kernel_is_that_of_torch():
    inputs = torch.randn(3, 1, 2, 5, 8)
    use("cudnn")
    assert torch.equal(scaled_dot_product(*inputs), stock_attention(*inputs))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kernel_is_chosen_on_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    assert choose_kernel("auto", Shape(), device).kernel in candidates("auto", device)
