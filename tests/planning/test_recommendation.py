"""The command that is recommended for a run that does not fit, and the cheapest change for it."""

import shlex

import pytest

from hyvideo.checks.rules import check
from hyvideo.models.sizes import released_sizes
from hyvideo.planning.hardware import Hardware
from hyvideo.planning.memory import memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.planning.recommendation import changes_in_order, cheapest_change, recommendation
from hyvideo.settings.command_line import load_config, parse
from tests.forked import ROOT

CONFIG = load_config(
    ROOT / "configs" / "hunyuanvideo15_480p_8gpu.yaml",
    optimizer="adamw",
    activation_checkpointing="full",
    precompute_conditions=False,
    sp_size=2,
    batch_size=2,
)
# Two rollouts and their branches in one training forward pass, without other models.
PAIRS = {
    "precompute_conditions": True,
    "offload": ["anchor", "vae", "reward"],
    "mini_batch_size_per_update": 2,
    "batched_forward": True,
}
LARGE = {"sample_n_frames": 121, "height": 480, "width": 848}


def run_of(world_size=8, gpu_memory=80.0, **changes):
    hardware = Hardware(gpu_memory=gpu_memory)
    sizes = released_sizes("480p_t2v")
    return PlannedRun(CONFIG.with_settings(**changes), world_size, sizes, hardware=hardware)


def test_a_run_that_fits_keeps_its_command():
    lines = recommendation(run_of(), ["--config", "a.yaml"])
    assert lines[0].split("  ")[-1].strip() == "NPROC=8 bash run_post_train.sh --config a.yaml"
    assert lines[-1].startswith("fits: ")
    assert recommendation(run_of(64), [])[0].endswith("bash run_post_train_multinode.sh")


@pytest.mark.parametrize(
    "changes, gpu_memory, advice",
    [
        ({"activation_checkpointing": "none"}, 80, {"activation_checkpointing": "full"}),
        ({}, 48, {"precompute_conditions": True}),
        (
            {"offload": [], "precompute_conditions": True},
            36,
            {"offload": ["anchor"]},
        ),
        (PAIRS, 32, {"batched_forward": "false"}),
    ],
)
def test_the_cheapest_change_is_suggested(changes, gpu_memory, advice):
    run = run_of(gpu_memory=gpu_memory, **changes)
    assert not memory(run).fits(gpu_memory)
    assert cheapest_change(run) == advice


def test_a_larger_sp_size_keeps_the_number_of_rollouts():
    run = run_of(gpu_memory=25, **PAIRS | {"mini_batch_size_per_update": 1, "vae_tile_size": 128})
    changed = run.with_settings(**cheapest_change(run))
    assert changed.settings.sp_size == 4 and changed.plan.rollouts == run.plan.rollouts


@pytest.mark.parametrize("gpu_memory", [22, 38])
def test_every_change_is_needed(gpu_memory):
    run = run_of(
        gpu_memory=gpu_memory,
        activation_checkpointing="none",
        offload=[],
        **LARGE,
    )
    change = cheapest_change(run)
    after = run.with_settings(**change)
    assert memory(after).fits(gpu_memory) and not after.problems
    offload = change.get("offload", [])
    for left_out in changes_in_order(run):
        if left_out.items() <= change.items():
            fewer = {name: value for name, value in change.items() if name not in left_out}
            assert not memory(run.with_settings(**fewer)).fits(gpu_memory)
    for part in offload:
        fewer = change | {"offload": [each for each in offload if each != part]}
        assert not memory(run.with_settings(**fewer)).fits(gpu_memory)


def test_the_command_for_a_lora_on_one_gpu_parses_is_legal_and_fits():
    gpu_memory = 22
    words = [
        "--config",
        str(ROOT / "configs/hunyuanvideo15_480p_8gpu_nft.yaml"),
        "--vae_tile_size=256",
    ]
    words += "--sp_size 1 --enable_fsdp false --lora_rank 32 --batch_size 8 --gradient_accumulation_steps 2".split()
    sizes = released_sizes("480p_t2v")
    run = PlannedRun(parse(words).config, 1, sizes, hardware=Hardware(gpu_memory=gpu_memory))
    command = recommendation(run, words)[0].removeprefix("command").strip()
    variable, program, script, *printed = shlex.split(command)
    assert (variable, program, script) == ("NPROC=1", "bash", "run_post_train.sh")
    config = parse(printed).config
    check(config, 1, on_this_machine=False)
    fitting = PlannedRun(config, 1, sizes, hardware=run.hardware)
    assert memory(fitting).fits(gpu_memory)


def test_nothing_fits_a_tiny_gpu_and_an_illegal_run_gets_no_command():
    (line,) = recommendation(run_of(gpu_memory=3), [])
    assert line.startswith("too large: ")
    (line,) = recommendation(run_of(world_size=7), [])
    assert line.startswith("illegal: sp_size ")
