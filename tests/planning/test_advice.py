"""The planner suggests the cheapest change, and the change works."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from hyvideo.models.hunyuan_video15.sizes import Architecture
from hyvideo.models.sizes import read_architecture
from hyvideo.planning.advice import changes_in_order, cheapest_change, fastest_change
from hyvideo.planning.cost import duration
from hyvideo.planning.hardware import Hardware, hardware_of
from hyvideo.planning.memory import memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.planning.report import training_command, verdict
from hyvideo.settings.command_line import load_config, parse
from hyvideo.settings.rules import check

ROOT = Path(__file__).parents[2]
CONFIG = load_config(
    ROOT / "configs" / "hunyuanvideo15_480p_8gpu.yaml",
    use_muon=False,
    activation_checkpointing="full",
    precompute_conditions=False,
    sp_size=2,
    batch_size=2,
)

# Two rollouts and their branches in one training forward pass, without other models.
PAIRS = {
    "precompute_conditions": True,
    "vae_offload": True,
    "reward_offload": True,
    "score_between_stages": True,
    "mini_batch_size_per_update": 2,
    "batched_forward": True,
}
LARGE = {"sample_n_frames": 121, "height": 480, "width": 848}


def run_of(world_size=8, gpu_memory=80.0, network=50.0, **changes):
    hardware = Hardware(gpu_memory=gpu_memory, network=network)
    return PlannedRun(
        CONFIG.with_settings(**changes), world_size, Architecture(), hardware=hardware
    )


def advised(run):
    """Return the suggested change and the changed run; assert that it fits, is legal, and is in the
    verdict.
    """
    gpu_memory = run.hardware.gpu_memory
    assert not memory(run).fits(gpu_memory)
    change = cheapest_change(run)
    after = run.with_settings(**change)
    assert memory(after).fits(gpu_memory) and not after.problems
    line, proposed = verdict(run)
    assert proposed == change
    assert line.startswith("too large: ") and "\n" not in line
    assert all(f"--{name} {str(value).lower()}" in line for name, value in change.items())
    return change, after


def test_a_run_that_fits_needs_no_change():
    assert verdict(run_of())[0].startswith("fits: ")


@pytest.mark.parametrize(
    "changes, gpu_memory, advice",
    [
        ({"enable_gradient_checkpointing": False}, 80, {"enable_gradient_checkpointing": True}),
        (
            {"enable_gradient_checkpointing": False, "activation_checkpointing": "selective"},
            55,
            {"enable_gradient_checkpointing": True, "activation_checkpointing": "full"},
        ),
        ({"enable_fsdp": False}, 80, {"enable_fsdp": True}),
        ({}, 48, {"precompute_conditions": True}),
        (
            {"reference_mode_offload": False, "precompute_conditions": True},
            36,
            {"reference_mode_offload": True},
        ),
        (PAIRS, 32, {"batched_forward": "false"}),
        (PAIRS, 30, {"mini_batch_size_per_update": 1}),
        (PAIRS | {"mini_batch_size_per_update": 1, "vae_tile_size": 128}, 25, {"sp_size": 4}),
        (
            {"enable_gradient_checkpointing": False, "enable_fsdp": False},
            80,
            {"enable_gradient_checkpointing": True, "enable_fsdp": True},
        ),
    ],
)
def test_the_cheapest_change_is_suggested(changes, gpu_memory, advice):
    assert advised(run_of(gpu_memory=gpu_memory, **changes))[0] == advice


@pytest.mark.parametrize("gpu", ["RTX 4090", "H100"])
@pytest.mark.parametrize("batched", [False, True])
def test_a_change_for_speed_is_not_slower(gpu, batched):
    """On an RTX 4090, batches are 2 % faster: too little to add them, and no reason to give them
    up.
    """
    config = load_config(ROOT / "configs/wan21_1gpu_nft.yaml", batched_forward=batched)
    architecture = read_architecture(
        config.model.pretrained_model_root, config.model.transformer_version
    )
    run = PlannedRun(config, 1, architecture, hardware=hardware_of(gpu))
    change = fastest_change(run)
    assert duration(run.with_settings(**change)).total <= duration(run).total
    assert change == ({"batched_forward": "true"} if gpu == "H100" and not batched else {})


@pytest.mark.parametrize("gpu_memory", [22, 26, 30, 34, 38, 42])
def test_no_cheaper_change_works_and_every_change_is_needed(gpu_memory):
    run = run_of(
        gpu_memory=gpu_memory,
        enable_gradient_checkpointing=False,
        reference_mode_offload=False,
        **LARGE,
    )
    change, _ = advised(run)
    for single in changes_in_order(run):
        if single.items() <= change.items():
            break
        changed = run.with_settings(**single)
        assert changed.problems or not memory(changed).fits(gpu_memory)
    for left_out in changes_in_order(run):
        if left_out.items() <= change.items():
            fewer = run.with_settings(
                **{name: value for name, value in change.items() if name not in left_out}
            )
            assert fewer.problems or not memory(fewer).fits(gpu_memory)


@pytest.mark.parametrize("gpu_memory", [16, 20, 22, 32, 48])
def test_the_command_for_a_lora_on_one_gpu_parses_is_legal_and_fits(gpu_memory):
    words = [
        "--config",
        str(ROOT / "configs/hunyuanvideo15_480p_8gpu_nft.yaml"),
        "--vae_tile_size=256",
    ]
    words += "--sp_size 1 --enable_fsdp false --lora_rank 32 --batch_size 8 --gradient_accumulation_steps 2".split()
    run = PlannedRun(
        parse(words).config, 1, Architecture(), hardware=Hardware(gpu_memory=gpu_memory)
    )
    _, change = verdict(run)
    variable, _, launcher, *printed = shlex.split(training_command(run, words, change))
    assert (variable, launcher) == ("NPROC=1", "run_post_train.sh")
    config = parse(printed).config
    check(config, 1, on_this_machine=False)
    assert config.record.save_minutes == 60 and memory(replace(run, config=config)).fits(gpu_memory)
    assert (
        change == {} or printed.count("--vae_tile_size") + ("--vae_tile_size=256" in printed) == 1
    )
    assert (config.model.base_weight_dtype == "fp8") == (gpu_memory <= 20)


def test_an_illegal_change_is_not_suggested():
    """Two replicas of 2 rollouts hold one group of 4; with sp_size 8 the only replica would hold
    half a group.
    """
    run = run_of(gpu_memory=20, precompute_conditions=True, sp_size=4)
    assert run.with_settings(sp_size=8).problems and {"sp_size": 8} in changes_in_order(run)
    assert advised(run)[1].settings.sp_size == 4


def test_a_change_that_breaks_another_rule_is_not_suggested():
    """With an EMA, the weights cannot be in bf16."""
    run = run_of(gpu_memory=20, precompute_conditions=True)
    with pytest.raises(ValueError, match="ema_decay needs master_weight_type fp32"):
        check(run.with_settings(ema_decay=0.99, master_weight_type="bf16").config, 8)
    assert "master_weight_type" in advised(run)[0]
    assert "master_weight_type" not in advised(run.with_settings(ema_decay=0.99))[0]


def test_a_lora_is_suggested_on_one_gpu():
    assert (
        "--lora_rank 64"
        in verdict(run_of(1, gpu_memory=48, sp_size=1, batch_size=4, enable_fsdp=False))[0]
    )


def test_the_verdict_reports_that_no_change_helps():
    assert "no known change makes it fit; use more GPUs" in verdict(run_of(gpu_memory=5))[0]


def test_an_illegal_run_has_the_rule_as_its_verdict():
    text, suggestion = verdict(run_of(batch_size=3))
    assert text.startswith(
        "illegal: batch_size must be a multiple or a divisor of num_generations, so that"
    )
    assert "got batch_size 3 and num_generations 4" in text and suggestion is None


def test_the_fastest_run_shards_within_a_node_keeps_attention_and_no_encoders():
    layout = {"sp_size": 1, "batch_size": 1}
    fastest = layout | {
        "dp_replicate": 8,
        "activation_checkpointing": "selective",
        "precompute_conditions": True,
    }
    assert fastest_change(run_of(64)) == fastest_change(run_of(64, network=3)) == fastest
    slow, best = run_of(64, network=3), run_of(64, network=3, **fastest)
    assert duration(slow).total > 1.5 * duration(best).total and fastest_change(best) == {}
    without = fastest_change(run_of(enable_gradient_checkpointing=False, sample_n_frames=5))
    assert without["precompute_conditions"] and "activation_checkpointing" not in without


@pytest.mark.slow
def test_a_small_gpu_shards_further_and_splits_videos():
    options = {"vae_tile_size": 128, "sample_n_frames": 161}
    small, smaller = (fastest_change(run_of(64, gpu_memory=gib, **options)) for gib in (40, 25))
    common = {"activation_checkpointing": "selective", "precompute_conditions": True}
    assert small == common | {"dp_replicate": 4} and smaller == common | {
        "sp_size": 4,
        "batch_size": 4,
    }
    assert fastest_change(run_of(64, gpu_memory=5)) is None


@pytest.mark.parametrize("changes", [{}, {"batch_size": 1, "gradient_accumulation_steps": 2}])
def test_the_fastest_run_has_as_many_rollouts_and_is_legal(changes):
    run = run_of(num_generations=4, **changes)
    best = run.with_settings(**fastest_change(run))
    check(best.config, 8, on_this_machine=False)
    assert (run.settings.sp_size, best.settings.sp_size) == (
        2,
        1,
    ) and best.plan.rollouts == run.plan.rollouts
    assert duration(best).total < duration(run).total / 1.1


def test_batching_is_fastest_if_every_gather_crosses_a_slow_network():
    change = {"dp_replicate": 2, "precompute_conditions": True, "batched_forward": "true"}
    assert fastest_change(run_of(64, gpu_memory=25, network=2, vae_tile_size=128)) == change


def test_larger_tiles_are_tried_where_decoding_takes_much_of_an_iteration():
    """Whole frames would be equally fast and need more memory; in a longer iteration tiles hardly
    matter.
    """
    short = {
        "objective": "nft",
        "nft_levels": 1,
        "eta": 0.0,
        "grpo_sampling_steps": 4,
        "cfg_scale": 1,
        "kl_weight": 0,
    }
    run = run_of(**short)
    change = fastest_change(run)
    assert change["vae_tile_size"] == 384 and "vae_tile_size" not in fastest_change(run_of())
    before, after, whole = (
        duration(run.with_settings(vae_tile_size=tile)).total for tile in (256, 384, 0)
    )
    assert before > 1.03 * after and after < 1.03 * whole


def test_batches_of_a_small_model_are_suggested_for_nft_and_not_for_grpo_whose_ratio_would_not_be_exact():
    config = load_config(ROOT / "configs" / "wan21_1gpu_nft.yaml", batched_forward="false")
    architecture = read_architecture(
        config.model.pretrained_model_root, config.model.transformer_version
    )
    nft = PlannedRun(config, 1, architecture)
    assert fastest_change(nft)["batched_forward"] == "true"
    stages, batched = (
        duration(run).stages for run in (nft, nft.with_settings(batched_forward="true"))
    )
    launches = 80 * 30 * 0.5e-3  # 8 rollouts of 10 steps, 30 blocks
    assert stages["rollout"] - batched["rollout"] == pytest.approx(7 / 8 * launches)
    assert all(stages[name] == batched[name] for name in stages if name != "rollout")
    grpo = nft.with_settings(objective="grpo", eta=0.5)
    assert duration(grpo).total > 1.03 * duration(grpo.with_settings(batched_forward="true")).total
    assert "batched_forward" not in fastest_change(grpo)
