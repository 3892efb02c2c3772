"""What several tests marked cuda need: where they compute, a sampler on random weights, and its inputs."""

import os
import statistics
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hyvideo.data.randomness import normal
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import parallelize
from hyvideo.evaluation.speed import take_turns
from hyvideo.models.conditions import Condition
from hyvideo.models.family import prepare
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, SamplerSettings
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler

DEVICE = torch.device(os.environ.get("CHECK_DEVICE", "cuda"))
IS_TINY = DEVICE.type == "cpu" or "CHECK_TINY" in os.environ
TINY_MODEL = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "rope_axes_dim": (4, 6, 6)}
TINY_MODEL |= {"num_refiner_layers": 1, "text_embed_dim": 64, "image_embed_dim": 24}
TINY_MODEL |= {"in_channels": 9, "out_channels": 4}
# Kernels of attention to compare, by name; "default" leaves the choice as a run has it. A CPU has one.
KERNELS = {"default": None}
if DEVICE.type == "cuda":
    KERNELS |= {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
# Whether blocks are compiled, and by which kernel they attend: what is compiled keeps the kernel of its first call.
WAYS = {f"eager-{kernel}": (False, kernel) for kernel in KERNELS} | {"compiled-default": (True, "default")}


def only(kernel):
    """A context in which attention has no other kernel than that of this name."""
    return sdpa_kernel([KERNELS[kernel]]) if KERNELS[kernel] else nullcontext()


def arrange(transformer, **how):
    """Recomputes and compiles as a run does, or no longer compiles; on a CPU compile only traces."""
    for block in transformer.transformer_blocks:
        block._compiled_call_impl = None
    backend = "inductor" if DEVICE.type == "cuda" else "eager"
    parallelize(transformer, Mesh(rank=0, world_size=1, sp_size=1), compile_backend=backend, **how)


def sampler(work, num_steps=20):
    """The sampler of a run at guidance 6, on a transformer with our forward pass; nothing is decoded by it."""
    transformer = work.transformer()
    prepare(transformer, {"text"})
    scheduler = FlowMatchDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(num_steps)
    return GRPOPipeline(
        transformer,
        None,
        scheduler,
        sampling=SamplerSettings(batched_forward=False),
        negative=condition(work, "negative"),
        compute_dtype=work.dtype,
    )


def condition(work, name):
    """A text of random states."""
    sizes = work.architecture
    text = normal((work.text_tokens, sizes.text_width), 0, name).to(work.device, work.dtype)
    return Condition(text)


def drawn(work, rows, name):
    """Random latents. Shape: (rows, channels, frames, height, width)."""
    shape = (work.architecture.out_channels, *work.grid)
    return torch.stack([normal(shape, 0, name, row) for row in range(rows)]).to(work.device)


def median_seconds(call, repeats):
    """Median of the seconds of a call that has been made once before."""
    return statistics.median(take_turns({"it": call}, repeats, DEVICE)["it"])
