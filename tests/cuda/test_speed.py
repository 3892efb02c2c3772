"""Speed and peak memory of the released model, recorded by each test. On a CPU, the tests run with a tiny model."""

import importlib.util
import math
import platform
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15

from hyvideo.config.memory.phases import memory
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.sections import OptimizerSettings
from hyvideo.config.settings import Config
from hyvideo.models.attention_kernels import scaled_dot_product
from hyvideo.models.conditions import Conditions
from hyvideo.models.family import prepare
from hyvideo.models.hunyuan_video15.vae import install_layers, set_tiling
from hyvideo.models.lora import add_trainable_lora, training_config
from hyvideo.training.optimizers import make_optimizers
from tests.cuda.speed import Workload, peak_gib, product_rates, relative_difference, sample, seconds_of, train
from tests.cuda.workload import (
    DEVICE,
    IS_TINY,
    KERNELS,
    TINY_MODEL,
    TINY_VAE,
    WAYS,
    arrange,
    condition,
    drawn,
    median_seconds,
    only,
    profiled_kernel,
    sampler,
)

pytestmark = pytest.mark.cuda
PACKAGES = ("torch", "triton", "transformers", "diffusers", "peft", "accelerate", "numpy")
NUM_KERNELS = 20
# Seconds of a forward pass by frames: published time of sampling with guidance / (2 x steps), text and VAE included.
ELSEWHERE = {121: {"vLLM-Omni": 2.59, "diffusers": 11.4}, 33: {"vLLM-Omni": 0.50, "diffusers": 1.45}}
# Tokens of 81 frames of 480 x 864, and of 121 frames of 480 x 832, with 200 text tokens.
TOKENS = {"34k": 34_220, "48k": 48_560}


@pytest.fixture
def record(record_property):
    """A function that records a dictionary of values."""
    return lambda numbers: [record_property(name, value) for name, value in numbers.items()]


@pytest.fixture(scope="module")
def rate(work):
    """FLOP/s of a matrix product."""
    return max(product_rates(work).values())


@pytest.fixture(scope="module")
def model(work):
    return ours(work)


@pytest.fixture(scope="module")
def inputs(work, model):
    return work.inputs(model)


def ours(work):
    transformer = work.transformer()
    prepare(transformer, {"text"})
    return transformer


@pytest.fixture(scope="module")
def first_output():
    """The velocity of the first measured forward pass, under "velocity"."""
    return {}


def speed(work, rate, call, forwards=1.0):
    seconds = median_seconds(call, 2)
    return {"s": seconds} | work.speed(seconds, rate, forwards=forwards) | {"peak GiB": peak_gib(call, DEVICE)}


def test_machine(work, record):
    """Records versions, the device and the rate of matrix products."""
    versions = {name: version(name) if importlib.util.find_spec(name) else "absent" for name in PACKAGES}
    record({"python": platform.python_version()} | versions)
    if DEVICE.type == "cuda":
        properties = torch.cuda.get_device_properties(DEVICE)
        capability = f"{properties.major}.{properties.minor}"
        record({"device": properties.name, "GiB": properties.total_memory / 2**30, "capability": capability})
        record({"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()})
    rates = product_rates(work)
    record({f"TFLOP/s of {rows:,} rows": rate / 1e12 for rows, rate in rates.items()})
    assert min(rates.values()) > 0


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention(work, record, kernel, tokens):
    """Records the profiled kernel and its speed for the tokens of one video."""
    sizes, tokens = work.architecture, work.tokens + work.text_tokens if IS_TINY else TOKENS[tokens]
    heads, head_dim = sizes.num_attention_heads, sizes.attention_head_dim
    query, key, value = torch.randn(
        (3, 1, heads, tokens, head_dim), dtype=work.dtype, device=DEVICE, requires_grad=True
    )
    with only(kernel):
        name = profiled_kernel(torch.no_grad()(partial(scaled_dot_product, query, key, value)))
        forward = torch.no_grad()(partial(scaled_dot_product, query, key, value))
        seconds = median_seconds(forward, 5)
        both = median_seconds(lambda: scaled_dot_product(query, key, value).sum().backward(), 3)
    flops = 4 * tokens**2 * sizes.width / 1e12
    record({"kernel": name, "TFLOP/s": flops / seconds, "with backward": 3.5 * flops / both})
    assert "attention" in name or DEVICE.type == "cuda"


@pytest.mark.parametrize("compiled, kernel", WAYS.values(), ids=WAYS)
def test_forward(work, rate, model, inputs, first_output, record, compiled, kernel):
    arrange(model, compile=compiled)
    with only(kernel):
        record(speed(work, rate, partial(sample, model, inputs["ours"])))
        velocity = sample(model, inputs["ours"]).float()
    difference = relative_difference(velocity, first_output.setdefault("velocity", velocity))
    record({"difference": difference})
    assert difference < 0.02


def test_diffusers_forward(work, model, inputs, first_output, record):
    """Times one forward pass of diffusers on the same weights and inputs."""
    stock, velocities = work.transformer(), []
    seconds = seconds_of(lambda: velocities.append(sample(stock, inputs["stock"]).float()), DEVICE)
    expected = first_output.get("velocity")
    difference = relative_difference(velocities[0], sample(model, inputs["ours"]) if expected is None else expected)
    record({"s": seconds, "difference": difference})
    assert difference < 0.02


@pytest.mark.parametrize("frames", ELSEWHERE)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_guided_step(work, model, rate, record, compiled, frames):
    """Times a forward pass of a guided step, 480 x 832, beside the same forward pass elsewhere on one H200."""
    size = work if IS_TINY else replace(work, grid=((frames - 1) // 4 + 1, 30, 52))
    arrange(model, compile=compiled)
    pipeline = sampler(size, transformer=model)
    conditions, latents = Conditions((condition(size, "positive"),)), drawn(size, 1, "initial")

    def step():
        with torch.no_grad():
            return pipeline.velocity(latents, pipeline.scheduler.timesteps[[3]], conditions)

    seconds = median_seconds(step, 2) / 2
    record({"s of a forward pass": seconds, "tokens": size.tokens} | size.speed(seconds, rate))
    record({f"{program} on an H200, s": known for program, known in ELSEWHERE[frames].items()})
    assert step().isfinite().all()


@pytest.mark.parametrize("recompute", ["selective"] if IS_TINY else ["full", "selective"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training(work, rate, model, inputs, record, compiled, recompute):
    """Times forward and backward with gradients of all weights."""
    arrange(model, recompute=recompute, compile=compiled)
    linear = 1 - work.flops.attention / work.flops.total
    forwards = 4 if recompute == "full" else 3 + linear
    record(speed(work, rate, partial(train, model, inputs["ours"]), forwards))


def test_lora(work, record):
    """Records time and peak memory of a LoRA update of rank 32, and the planned peak."""
    pipeline = sampler(work)
    transformer, settings = pipeline.transformer, OptimizerSettings(lora_rank=32)
    add_trainable_lora(transformer, training_config(transformer, rank=32, alpha=32.0))
    arrange(transformer, recompute="selective", compile=not IS_TINY)
    trained = {name: parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    optimizers = make_optimizers(settings, trained, work.dtype, hidden=work.family.matrices)
    conditions, latents = Conditions((condition(work, "positive"),)), drawn(work, 1, "initial")

    def a_pass():
        step = pipeline.replay(latents, latents, pipeline.scheduler.timesteps[[3]], conditions)
        step.log_prob.sum().backward()

    def update():
        for _ in range(2):  # the second pass holds gradients and activations together
            a_pass()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizers.step(settings.learning_rate)

    update()
    held = torch.cuda.memory_allocated(DEVICE) / 2**30 if DEVICE.type == "cuda" else 0.0
    record({"peak GiB": held + peak_gib(update, DEVICE), "planned GiB": planned_gib(work)})
    record({"s of a pass": median_seconds(a_pass, 2)})
    assert all(parameter.isfinite().all() for parameter in trained.values())


def planned_gib(work):
    """Return the peak GiB that the planner predicts for an update, for the transformer alone."""
    frames, height, width = (5, 64, 64) if IS_TINY else (81, 480, 864)
    settings = {"sample_n_frames": frames, "height": height, "width": width, "lora_rank": 32, "batch_size": 4}
    settings |= {"enable_gradient_checkpointing": True, "activation_checkpointing": "selective", "kl_weight": 0.0}
    run = PlannedRun(Config().with_settings(**settings).resolved(), 1, work.architecture, work.text_tokens)
    others = ("EMA", "anchor", "encoders", "VAE", "reward models", "trajectories")
    phases = {name: items for name, items in memory(run).phases.items() if name.startswith("backward")}
    return max(sum(v for item, v in items.items() if item not in others) for items in phases.values()) / 2**30


def test_decode(gpu, record):
    """Records time and peak memory of decoding one video in tiles."""
    work, sizes, tile = Workload(gpu, torch.float16), {}, 256
    if IS_TINY:
        work, tile = Workload(gpu, torch.float32, TINY_MODEL, (1, 4, 4)), 32
        sizes = TINY_VAE
    with gpu:
        vae = AutoencoderKLHunyuanVideo15(**sizes).to(work.dtype).eval()
    install_layers(vae)
    set_tiling(vae, tile, 0.125)
    latents = drawn(work, 1, "initial")[:, : vae.config.latent_channels].to(work.dtype)
    decode = torch.no_grad()(partial(vae.decode, latents))
    record({"s": median_seconds(decode, 1), "peak GiB": peak_gib(decode, DEVICE)})
    assert decode().sample.isfinite().all()


def test_profile(work, record):
    """Records the slowest kernels of a compiled forward and backward pass of a few blocks."""
    few = replace(work, sizes=work.sizes | {"num_layers": min(4, work.architecture.num_layers)})
    transformer = ours(few)
    inputs = few.inputs(transformer)["ours"]
    arrange(transformer, recompute="selective", compile=not IS_TINY)
    train(transformer, inputs)
    is_gpu, kinds = DEVICE.type == "cuda", torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if is_gpu else kinds.CPU]) as profiler:
        train(transformer, inputs)
    field = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    spent = {event.key: (getattr(event, field) / 1e3, event.count) for event in profiler.key_averages()}
    total = math.fsum(ms for ms, _ in spent.values())
    for name, (ms, count) in sorted(spent.items(), key=lambda item: item[1], reverse=True)[:NUM_KERNELS]:
        record({name[:120]: f"{ms:.3g} ms, {count} calls, {ms / total:.1%}"})
    assert total > 0
