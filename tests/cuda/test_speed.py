"""Speed and peak memory of the transformer at the sizes of the recipes.

On a CPU, the tests run with a tiny model.
"""

import importlib.util
import math
import platform
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import pytest
import torch

from hyvideo.models.conditions import Conditions
from hyvideo.models.family import family_named, prepare
from hyvideo.models.lora import add_trainable_lora, training_config
from hyvideo.planning.memory import memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.config import Config
from hyvideo.settings.sections import OptimizerSettings
from hyvideo.training.optimizers import make_optimizers
from tests.cuda.full_width import WAN_TRANSFORMER
from tests.cuda.recipes import recipe
from tests.cuda.speed import Workload, peak_gib, product_rates, relative_difference, sample, train
from tests.cuda.workload import (
    DEVICE,
    IS_TINY,
    TINY_WAN,
    arrange,
    cache_modulation,
    condition,
    drawn,
    median_seconds,
    sampler,
    schedule_of,
)

pytestmark = pytest.mark.cuda
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "diffusers",
    "peft",
    "accelerate",
    "torchao",
    "numpy",
)
NUM_KERNELS = 20
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@pytest.fixture(scope="module")
def rate(work):
    """FLOP/s of a matrix product."""
    return max(product_rates(work).values())


@pytest.fixture(scope="module")
def model(work):
    return ours(work)


@pytest.fixture(scope="module")
def first_output():
    """The velocity of the first measured forward pass, under "velocity"."""
    return {}


def ours(work):
    transformer = work.transformer()
    prepare(transformer, {"text"})
    return transformer


def record_speed(record, work, rate, call, forwards=1.0):
    """Record the seconds and the speed of a call, and then the memory that it needs."""
    seconds = median_seconds(call, 2)
    record({"s": seconds} | work.speed(seconds, rate, forwards=forwards))
    record({"peak GiB": peak_gib(call, DEVICE)})


def test_machine(work, record):
    """Records versions, the device and the rate of matrix products."""
    versions = {
        name: version(name) if importlib.util.find_spec(name) else "absent" for name in PACKAGES
    }
    record({"python": platform.python_version()} | versions)
    if DEVICE.type == "cuda":
        properties = torch.cuda.get_device_properties(DEVICE)
        capability = f"{properties.major}.{properties.minor}"
        record(
            {
                "device": properties.name,
                "GiB": properties.total_memory / 2**30,
                "capability": capability,
            }
        )
        record({"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()})
        left = torch.empty(2**28, device=DEVICE)  # 1 GiB, read and written
        seconds = median_seconds(left.clone, 5)
        record({"TB/s of copies": 2 * left.nbytes / seconds / 1e12})
        host = torch.empty(2**28, pin_memory=True)
        seconds = median_seconds(lambda: left.copy_(host, non_blocking=True), 3)
        record({"GB/s from pinned memory": host.nbytes / seconds / 1e9})
        del left
    rates = product_rates(work)
    record({f"TFLOP/s of {rows:,} rows": rate / 1e12 for rows, rate in rates.items()})
    assert min(rates.values()) > 0


@COMPILED
def test_forward(work, rate, model, first_output, record, compiled):
    inputs = work.inputs(model)["ours"]
    arrange(model, compile=compiled)
    torch.manual_seed(0)
    record_speed(
        record, work, rate, partial(sample, model, first_output.setdefault("inputs", inputs))
    )
    velocity = sample(model, first_output["inputs"]).float()
    difference = relative_difference(velocity, first_output.setdefault("velocity", velocity))
    record({"difference": difference})
    assert difference < 0.02


def test_forward_of_validation(work, rate, model, record):
    """The compiled forward pass at the largest validation size: that of the paper's recipes."""
    each = recipe("paper/table2_a_8gpu")
    large = work if IS_TINY else replace(work, grid=each.grid(each.config.validation_sampling.size))
    arrange(model, compile=True)
    record({"tokens": large.tokens})
    record_speed(record, large, rate, partial(sample, model, large.inputs(model)["ours"]))


@pytest.mark.parametrize("name", ["wan21_1gpu_nft", "wan21_8gpu_nft"])
def test_forward_of_wan(gpu, rate, record, name):
    """The compiled forward pass of Wan2.1 1.3B at the size of a recipe."""
    each = recipe(name)
    grid = (2, 4, 4) if IS_TINY else each.grid(each.config.sampling.size)
    sizes = TINY_WAN if IS_TINY else WAN_TRANSFORMER
    wan = Workload(gpu, sizes=sizes, grid=grid, family=family_named("wan"))
    transformer = ours(wan)
    arrange(transformer, compile=True)
    record_speed(record, wan, rate, partial(sample, transformer, wan.inputs(transformer)["ours"]))


@COMPILED
def test_training(work, rate, model, record, compiled):
    """Forward and backward with gradients of all weights and full activation checkpointing."""
    arrange(model, recompute="full", compile=compiled)
    record_speed(record, work, rate, partial(train, model, work.inputs(model)["ours"]), forwards=4)


def test_lora(work, record):
    """Records time and peak memory of a LoRA update of rank 32, and the planned peak."""
    pipeline = sampler(work)
    transformer, settings = pipeline.transformer, OptimizerSettings(lora_rank=32)
    add_trainable_lora(transformer, training_config(transformer, rank=32, alpha=32.0))
    arrange(transformer, recompute="selective", compile=not IS_TINY)
    cache_modulation(transformer)
    trained = {
        name: parameter
        for name, parameter in transformer.named_parameters()
        if parameter.requires_grad
    }
    optimizers = make_optimizers(settings, trained, work.dtype, hidden=work.family.target_modules)
    conditions, latents = Conditions((condition(work, "positive"),)), drawn(work, 1, "initial")

    def a_pass():
        step = pipeline.replay(latents, latents, schedule_of(20), [3], conditions)
        step.log_prob.sum().backward()

    def update():
        for _ in range(2):  # the second pass holds gradients and activations together
            a_pass()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizers.step(settings.learning_rate)

    update()
    held = torch.cuda.memory_allocated(DEVICE) / 2**30 if DEVICE.type == "cuda" else 0.0
    record({"peak GiB": held + peak_gib(update, DEVICE), "planned GiB": planned_gib(work)})
    record({"s of a pass, with guidance": median_seconds(a_pass, 2)})
    assert all(parameter.isfinite().all() for parameter in trained.values())


def planned_gib(work):
    """Return the peak GiB that the planner predicts for an update, for the transformer alone."""
    frames, height, width = (5, 64, 64) if IS_TINY else (81, 352, 624)
    settings = {
        "sample_n_frames": frames,
        "height": height,
        "width": width,
        "lora_rank": 32,
        "batch_size": 4,
    }
    settings |= {
        "activation_checkpointing": "selective",
        "kl_weight": 0.0,
    }
    run = PlannedRun(
        Config().with_settings(**settings).resolved(), 1, work.architecture, work.text_tokens
    )
    others = ("EMA", "anchor", "encoders", "VAE", "reward models", "trajectories")
    phases = {
        name: items for name, items in memory(run).phases.items() if name.startswith("backward")
    }
    return (
        max(sum(v for item, v in items.items() if item not in others) for items in phases.values())
        / 2**30
    )


def test_profile(work, record):
    """Records the slowest kernels of a compiled forward and backward pass of a few blocks."""
    few = replace(work, sizes=work.sizes | {"num_layers": min(4, work.architecture.num_layers)})
    transformer = ours(few)
    inputs = few.inputs(transformer)["ours"]
    arrange(transformer, recompute="full", compile=not IS_TINY)
    train(transformer, inputs)
    is_gpu, kinds = DEVICE.type == "cuda", torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if is_gpu else kinds.CPU]) as profiler:
        train(transformer, inputs)
    field = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    spent = {
        event.key: (getattr(event, field) / 1e3, event.count) for event in profiler.key_averages()
    }
    total = math.fsum(ms for ms, _ in spent.values())
    for name, (ms, count) in sorted(spent.items(), key=lambda item: item[1], reverse=True)[
        :NUM_KERNELS
    ]:
        record({name[:120]: f"{ms:.3g} ms, {count} calls, {ms / total:.1%}"})
    assert total > 0
