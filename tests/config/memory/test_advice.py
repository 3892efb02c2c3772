"""The advice names the cheapest change, and the change that it names works."""

from dataclasses import replace
from pathlib import Path

import pytest

from hyvideo.config.command_line import load_config
from hyvideo.config.memory.advice import advise, changes_in_order, verdict
from hyvideo.config.memory.legal import problems
from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.phases import memory
from hyvideo.config.memory.run_shape import RunShape

RELEASED = Architecture()
CONFIG = load_config(Path(__file__).parents[3] / "configs" / "hunyuanvideo15_480p_8gpu.yaml", use_muon=False)

# Two rollouts in one training forward, without the models around.
PAIRS = {"precompute_conditions": True, "reward_bytes": 0.0, "mini_batch_size_per_update": 2}


def shape_of(world_size=8, **changes):
    return replace(RunShape.of(CONFIG, world_size), **changes)


def needed(shape) -> float:
    return memory(shape, RELEASED).needed_gib


def test_what_fits_needs_no_change():
    assert verdict(CONFIG, shape_of(), RELEASED, 80.0).startswith("fits: ")


@pytest.mark.parametrize(
    "changes, gpu_memory, flags",
    [
        ({"activation_checkpointing": "none"}, 80, "--enable_gradient_checkpointing true"),
        ({"enable_fsdp": False}, 80, "--enable_fsdp true"),
        ({}, 48, "--precompute_conditions true"),
        (
            {"reference_mode_offload": False, "precompute_conditions": True},
            36,
            "--reference_mode_offload true",
        ),
        (PAIRS, 35, "--batch_guidance false"),
        (PAIRS, 32, "--mini_batch_size_per_update 1"),
        (PAIRS | {"mini_batch_size_per_update": 1}, 28, "--sp_size 4"),
        (
            {"activation_checkpointing": "none", "enable_fsdp": False},
            80,
            "--enable_gradient_checkpointing true --enable_fsdp true",
        ),
    ],
)
def test_the_cheapest_change_is_named(changes, gpu_memory, flags):
    shape = shape_of(**changes)
    assert needed(shape) > gpu_memory
    advice = advise(CONFIG, shape, RELEASED, gpu_memory)
    assert advice.flags == flags
    assert needed(advice.shape) <= gpu_memory and not problems(CONFIG, advice.shape, RELEASED)
    line = verdict(CONFIG, shape, RELEASED, gpu_memory)
    assert line.startswith("too large: ") and flags in line and "\n" not in line


@pytest.mark.parametrize("gpu_memory", [22, 26, 30, 34, 38, 42])
def test_no_cheaper_single_change_works_and_none_of_several_is_needless(gpu_memory):
    shape = shape_of(activation_checkpointing="none", reference_mode_offload=False, frames=121, height=480, width=848)
    advice = advise(CONFIG, shape, RELEASED, gpu_memory)
    assert advice is not None and needed(advice.shape) <= gpu_memory
    for change in changes_in_order(shape, RELEASED):
        if change == advice.changes[0]:
            break
        single = replace(shape, **change.fields)
        assert needed(single) > gpu_memory or problems(CONFIG, single, RELEASED)
    for left_out in advice.changes if len(advice.changes) > 1 else ():
        fields = {k: v for change in advice.changes if change != left_out for k, v in change.fields.items()}
        fewer = replace(shape, **fields)
        assert needed(fewer) > gpu_memory or problems(CONFIG, fewer, RELEASED)


def test_a_change_that_is_not_legal_is_not_advised():
    """2 replicas of 2 rollouts hold one group of 4; with sp 8 the only replica would hold half of one."""
    shape = shape_of(precompute_conditions=True, sp_size=4)
    for change in changes_in_order(shape, RELEASED):
        if "sp_size" in change.fields:
            assert problems(CONFIG, replace(shape, **change.fields), RELEASED)
    advice = advise(CONFIG, shape, RELEASED, 20.0)
    assert advice is not None and advice.shape.sp_size == 4


def test_one_gpu_is_told_to_train_an_adapter():
    shape = shape_of(1, sp_size=1, batch_size=4, enable_fsdp=False)
    assert "--lora_rank 64" in verdict(CONFIG, shape, RELEASED, 80.0)


def test_it_is_said_when_nothing_helps():
    assert "no known change makes it fit 8 GPUs" in verdict(CONFIG, shape_of(), RELEASED, 5.0)


def test_an_illegal_run_is_told_the_nearest_legal_one():
    line = verdict(CONFIG, shape_of(batch_size=3), RELEASED, 80.0)
    assert line.startswith("illegal: ") and "nearest legal combination that fits: world_size 8, sp_size 2" in line
