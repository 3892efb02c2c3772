"""What a GPU does with the transformer and the VAE: whether it is right, and how fast; weights are random.

Each check yields rows for `isolated_checks`. On a CPU they run too, small, so that none meets a GPU untried.
"""

import importlib.util
import math
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hyvideo.config.memory.phases import memory
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.sections import OptimizerSettings
from hyvideo.config.settings import Config
from hyvideo.data.randomness import normal
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import Parallelism, parallelize
from hyvideo.evaluation.isolated_checks import Row
from hyvideo.evaluation.parity import relative_difference
from hyvideo.evaluation.speed import Workload, median_seconds, peak_gib, product_rates, sample, seconds_of, train
from hyvideo.models.attention import install_causal_mask
from hyvideo.models.attention_kernels import profiled_attention_kernel, use_fastest_kernels
from hyvideo.models.lora import start_lora, training_config
from hyvideo.models.transformer import install, stock_twin
from hyvideo.pipelines.conditions import Condition, Conditions
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline, SamplerSettings
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from hyvideo.training.model_setup import RequiredEncoders, prepare_transformer, set_tiling
from hyvideo.training.optimizers import make_optimizers

PACKAGES = ("torch", "triton", "transformers", "diffusers", "peft", "accelerate", "numpy")
_KERNELS_PROFILED = 20


def kernels_of(device: torch.device) -> dict[str, list[SDPBackend]]:
    """Attention kernels to compare, by name; an empty list leaves the choice as a run has it. A CPU has one."""
    if device.type != "cuda":
        return {"default": []}
    return {"default": [], "flash": [SDPBackend.FLASH_ATTENTION], "cudnn": [SDPBackend.CUDNN_ATTENTION]}


def only(backends: list[SDPBackend]) -> AbstractContextManager:
    return sdpa_kernel(backends) if backends else nullcontext()


def machine(work: Workload) -> Iterator[Row]:
    """Versions, the device, and what its matrix products reach."""
    versions = {name: version(name) if importlib.util.find_spec(name) else "absent" for name in PACKAGES}
    yield {"what": "versions", "python": platform.python_version()} | versions
    if work.device.type == "cuda":
        about = torch.cuda.get_device_properties(work.device)
        memory_gib, capability = about.total_memory / 2**30, f"{about.major}.{about.minor}"
        cuda = {"capability": capability, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        yield {"what": f"device {about.name}", "GiB": memory_gib} | cuda
    else:
        yield {"what": f"device CPU, {torch.get_num_threads()} threads"}
    for rows, rate in product_rates(work).items():
        yield {"what": f"product of {rows:,} rows", "TFLOP/s": rate / 1e12}


def attention(work: Workload) -> Iterator[Row]:
    """The kernel that a profile shows, and the speed of each on the tokens of one video."""
    use_fastest_kernels()
    sizes, tokens = work.architecture, work.tokens + work.text_tokens
    heads, head_dim = sizes.num_attention_heads, sizes.attention_head_dim
    kernel = profiled_attention_kernel(work.device, work.dtype, heads, head_dim, tokens)
    yield {"what": "kernel by profile", "name": kernel}
    shape = (3, 1, heads, tokens, head_dim)
    query, key, value = torch.randn(shape, dtype=work.dtype, device=work.device).requires_grad_()
    flops = 4 * tokens**2 * sizes.width

    def both_ways() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()

    for name, backends in kernels_of(work.device).items():
        with only(backends):
            with torch.no_grad():
                call = partial(torch.nn.functional.scaled_dot_product_attention, query, key, value)
                seconds = median_seconds(call, 5, work.device)
            trained = median_seconds(both_ways, 3, work.device)
        speeds = {"TFLOP/s": flops / seconds / 1e12, "with backward": 3.5 * flops / trained / 1e12}
        yield {"what": f"attention by {name}", "seconds": seconds} | speeds


def sampler(work: Workload, num_steps: int = 20) -> HunyuanVideoGRPOPipeline:
    """The sampler of a run at guidance 6, on a transformer with our forward pass; nothing is decoded by it."""
    transformer = work.transformer()
    prepare_transformer(transformer, RequiredEncoders(glyphs=False, images=False))
    scheduler = FlowMatchDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(num_steps)
    return HunyuanVideoGRPOPipeline(
        transformer,
        None,
        scheduler,
        sampling=SamplerSettings(batched_forward=False),
        negative=condition(work, "negative"),
        compute_dtype=work.dtype,
    )


def condition(work: Workload, name: str) -> Condition:
    """A text of random states."""
    sizes = work.architecture
    text = normal((work.text_tokens, sizes.text_embed_dim), 0, name).to(work.device, work.dtype)
    return Condition(text, text.new_zeros(0, sizes.text_embed_2_dim))


def drawn(work: Workload, rows: int, name: str) -> Tensor:
    """Random latents. Shape: (rows, channels, frames, height, width)."""
    shape = (work.architecture.out_channels, *work.grid)
    return torch.stack([normal(shape, 0, name, row) for row in range(rows)]).to(work.device)


def arrange(transformer: nn.Module, how: Parallelism, device: torch.device) -> None:
    """Recomputes and compiles as a run does; on a CPU compile only traces."""
    backend = "inductor" if device.type == "cuda" else "eager"
    parallelize(transformer, Mesh(rank=0, world_size=1, sp_size=1), replace(how, compile_backend=backend))


def _speed(work: Workload, rate: float, call, *, forwards: float = 1.0, repeats: int = 2) -> Row:
    seconds = median_seconds(call, repeats, work.device)
    speed = forwards * work.flops.total / seconds
    return {
        "seconds": seconds,
        "TFLOP/s": speed / 1e12,
        "share of the product": speed / rate,
        "peak GiB": peak_gib(call, work.device),
    }


def forwards(work: Workload) -> Iterator[Row]:
    """A forward by each attention kernel, eager and compiled, and diffusers' own once."""
    use_fastest_kernels()
    rate = max(product_rates(work).values())
    transformer, inputs = work.transformer(), work.inputs()
    stock, first = stock_twin(transformer), None
    install(transformer)
    for compiled in (False, True):
        arrange(transformer, Parallelism(compile=compiled), work.device)
        for kernel, backends in kernels_of(work.device).items():
            with only(backends):
                row = _speed(work, rate, partial(sample, transformer, inputs["ours"]))
                out = sample(transformer, inputs["ours"]).float()
            first = out if first is None else first
            what = f"forward, {'compiled' if compiled else 'eager'}, {kernel}"
            yield {"what": what} | row | {"difference": relative_difference(out, first)}
    outs: list[Tensor] = []
    seconds = seconds_of(lambda: outs.append(sample(stock, inputs["stock"])), work.device)
    yield {"what": "forward, diffusers' own", "seconds": seconds, "difference": relative_difference(outs[0], first)}


def training(work: Workload) -> Iterator[Row]:
    """Forward and backward with gradients of all weights, by what is recomputed."""
    use_fastest_kernels()
    rate = max(product_rates(work).values())
    transformer, inputs = work.transformer(), work.inputs()["ours"]
    prepare_transformer(transformer, RequiredEncoders(glyphs=False, images=False))
    linear = 1 - work.flops.attention / work.flops.total
    for compiled in (False, True):
        for recompute, forwards in (("full", 4.0), ("selective", 3 + linear)):
            arrange(transformer, Parallelism(recompute=recompute, compile=compiled), work.device)
            row = _speed(work, rate, partial(train, transformer, inputs), forwards=forwards)
            yield {"what": f"forward and backward, {'compiled' if compiled else 'eager'}, {recompute}"} | row


def lora(work: Workload, size: tuple[int, int, int]) -> Iterator[Row]:
    """An update of a LoRA of rank 32: guided passes and the optimizer's step, and the peak beside the planner's.

    Args:
        size: Frames, height and width of the video, for the planner.
    """
    use_fastest_kernels()
    pipeline = sampler(work)
    transformer, settings = pipeline.transformer, OptimizerSettings(lora_rank=32)
    start_lora(transformer, training_config(transformer, rank=32, alpha=32.0))
    arrange(transformer, Parallelism(recompute="selective", compile=True), work.device)
    trained = {name: parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    optimizers = make_optimizers(settings, trained, work.dtype)
    conditions, latents = Conditions((condition(work, "positive"),)), drawn(work, 1, "initial")

    def a_pass() -> None:
        step = pipeline.replay(latents, latents, pipeline.scheduler.timesteps[[3]], conditions)
        step.log_prob.sum().backward()

    def update() -> None:
        for _ in range(2):  # the second has gradients while it keeps activations
            a_pass()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizers.step(settings.learning_rate)

    update()
    held = torch.cuda.memory_allocated(work.device) / 2**30 if work.device.type == "cuda" else 0.0
    peak = held + peak_gib(update, work.device)
    finite = all(parameter.isfinite().all() for parameter in trained.values())
    planned = _planned_gib(work, size)
    yield {"what": "LoRA of rank 32, update of two passes", "ok": finite, "peak GiB": peak, "planned GiB": planned}
    seconds = median_seconds(a_pass, 2, work.device)
    yield {"what": "LoRA, pass of two branches", "seconds": seconds, "of 20 steps": 20 * seconds}


def _planned_gib(work: Workload, size: tuple[int, int, int]) -> float:
    """GiB that the planner gives an update of the transformer alone."""
    frames, height, width = size
    settings = {"sample_n_frames": frames, "height": height, "width": width, "lora_rank": 32, "batch_size": 4}
    settings |= {"enable_gradient_checkpointing": True, "activation_checkpointing": "selective", "kl_weight": 0.0}
    config = Config().with_settings(**settings).resolved()
    run = PlannedRun(config, 1, work.architecture, work.text_tokens)
    others = ("EMA", "anchor", "encoders", "VAE", "reward models", "trajectories")
    phases = {name: items for name, items in memory(run).phases.items() if name.startswith("backward")}
    return max(sum(v for item, v in items.items() if item not in others) for items in phases.values()) / 2**30


def decode(work: Workload, vae_sizes: dict, tile_size: int) -> Iterator[Row]:
    """Decoding of one video in tiles."""
    from diffusers import AutoencoderKLHunyuanVideo15

    with work.device:
        vae = AutoencoderKLHunyuanVideo15(**vae_sizes).to(work.dtype).eval()
    install_causal_mask(vae)
    set_tiling(vae, tile_size, 0.125)
    latents = drawn(work, 1, "initial")[:, : vae.config.latent_channels].to(work.dtype)
    call = torch.no_grad()(partial(vae.decode, latents))
    seconds = median_seconds(call, 1, work.device)
    finite = bool(call().sample.isfinite().all())
    yield {"what": "decode in tiles", "ok": finite, "seconds": seconds, "peak GiB": peak_gib(call, work.device)}


def profile(work: Workload) -> Iterator[Row]:
    """The slowest kernels of a compiled forward and backward of a few blocks."""
    few = replace(work, sizes=work.sizes | {"num_layers": min(4, work.architecture.num_layers)})
    use_fastest_kernels()
    transformer, inputs = few.transformer(), few.inputs()["ours"]
    prepare_transformer(transformer, RequiredEncoders(glyphs=False, images=False))
    arrange(transformer, Parallelism(recompute="selective", compile=True), work.device)
    train(transformer, inputs)
    kinds = torch.profiler.ProfilerActivity
    is_gpu = work.device.type == "cuda"
    with torch.profiler.profile(activities=[kinds.CUDA] if is_gpu else [kinds.CPU]) as profiler:
        train(transformer, inputs)
    name = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, name))
    total = math.fsum(getattr(event, name) for event in events)
    for event in events[:_KERNELS_PROFILED]:
        spent = getattr(event, name)
        yield {"what": event.key[:120], "ms": spent / 1e3, "calls": event.count, "share": spent / total}
