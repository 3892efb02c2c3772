"""Shared parts of the tests marked cuda: the device, a sampler on random weights, and its
inputs.
"""

import functools
import importlib.util
import os
import statistics
from contextlib import contextmanager

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import profile
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from hyvideo.data.randomness import normal
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import parallelize
from hyvideo.models import attention_kernels
from hyvideo.models.conditions import Condition
from hyvideo.models.family import blocks, family_of, prepare
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, SamplerSettings
from hyvideo.schedulers.schedule import Schedule
from tests.cuda.speed import take_turns

DEVICE = torch.device(os.environ.get("CHECK_DEVICE", "cuda"))
IS_TINY = DEVICE.type == "cpu" or "CHECK_TINY" in os.environ
TINY_MODEL = {
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "rope_axes_dim": (4, 6, 6),
}
TINY_MODEL |= {"num_refiner_layers": 1, "text_embed_dim": 64, "image_embed_dim": 24}
TINY_MODEL |= {"in_channels": 9, "out_channels": 4}
TINY_WAN = {
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "ffn_dim": 64,
    "text_dim": 32,
}
# Attention kernels to compare; "default" is the choice of a run. A CPU has only that one.
KERNELS = {"default": None}
if DEVICE.type == "cuda":
    KERNELS |= {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if importlib.util.find_spec("flash_attn_interface"):
        KERNELS["flash3"] = SDPBackend.FLASH_ATTENTION
# Compiled or eager, and the attention kernel. A compiled block keeps the kernel of its first call.
WAYS = {f"eager-{kernel}": (False, kernel) for kernel in KERNELS} | {
    "compiled-default": (True, "default")
}


@contextmanager
def only(kernel):
    """Context in which attention uses only this kernel."""
    if not KERNELS[kernel]:
        yield
        return
    before = attention_kernels._kernel
    attention_kernels.use(kernel)
    try:
        with sdpa_kernel([KERNELS[kernel]]):
            yield
    finally:
        attention_kernels.use(before)


def profiled_kernel(attend):
    """Return the name of the slowest kernel of an attention call; on the CPU, the name of torch's
    operator.
    """
    if DEVICE.type != "cuda":
        with Operator() as operator:
            attend()
        return operator.name
    attend()  # warm-up: the first call loads and builds kernels
    with profile(use_device="cuda") as profiled:
        attend()
        torch.cuda.synchronize(DEVICE)
    kernels = [call for call in profiled.key_averages() if call.device_type == DeviceType.CUDA]
    slowest = max(kernels, key=lambda call: call.self_device_time_total, default=None)
    # CUPTI is missing, or another profiler uses it
    return slowest.key if slowest else "not recorded"


class Operator(TorchDispatchMode):
    """Records the name of torch's attention operator.

    The CPU profiler is not used because it prints to stderr.
    """

    # not dispatched: torch decomposes it into matmuls and softmax
    name = "aten::_scaled_dot_product_attention_math"

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if "scaled_dot_product" in operator.name():
            self.name = operator.name()
        return operator(*arguments, **(options or {}))


def arrange(transformer, *, traces_on_cpu=False, mesh=None, **how):
    """Set up activation checkpointing and compilation as in a run.

    On a CPU, compilation only traces static shapes for `traces_on_cpu`, and is skipped otherwise,
    because it is slow.
    """
    for block in blocks(transformer):
        block._compiled_call_impl = None
    backend, compiled = "inductor" if DEVICE.type == "cuda" else "eager", torch.compile
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type != "cuda":  # dynamic shapes take three times as long
            static = functools.partial(compiled, dynamic=False, backend=backend)
            patch.setattr(
                torch, "compile", lambda call, **_: static(call) if traces_on_cpu else call
            )
        parallelize(
            transformer,
            mesh or Mesh(rank=0, world_size=1, sp_size=1),
            compile_backend=backend,
            **how,
        )


def cache_modulation(transformer):
    """Keep the frozen modulation layers on the CPU, as a run with a LoRA does: its blocks are
    compiled differently.
    """
    transformer.modulation_cache = family_of(transformer).cache_modulation(transformer)
    assert transformer.modulation_cache


def schedule_of(num_steps):
    """Return the schedule of a run with the default sampler."""
    return Schedule.build("sage_grpo", num_steps=num_steps, shift=5.0, eta=0.5)


def sampler(work, transformer=None):
    """Return the sampler of a run with guidance scale 6 and our forward pass, without a VAE."""
    if transformer is None:
        transformer = work.transformer()
        prepare(transformer, {"text"})
    return GRPOPipeline(
        transformer,
        None,
        sampling=SamplerSettings(batched_forward=False),
        negative=condition(work, "negative"),
        compute_dtype=work.dtype,
    )


def condition(work, name):
    """Return a condition with random text states."""
    sizes = work.architecture
    text = normal((work.text_tokens, sizes.text_width), 0, name).to(work.device, work.dtype)
    return Condition(text)


def drawn(work, rows, name):
    """Return random latents. Shape: (rows, channels, frames, height, width)."""
    shape = (work.architecture.out_channels, *work.grid)
    return torch.stack([normal(shape, 0, name, row) for row in range(rows)]).to(work.device)


def median_seconds(call, repeats):
    """Return the median seconds of a call, after one warm-up call."""
    return statistics.median(take_turns({"call": call}, repeats, DEVICE)["call"])
