"""FLOPs and hours of an iteration, a validation and a whole run."""

from dataclasses import replace

import pytest

from hyvideo.models.sizes import released_sizes
from hyvideo.planning.hardware import Hardware, hardware_of, hardware_of_device
from hyvideo.planning.hours import (
    decode_flops,
    decode_seconds,
    forward_seconds,
    forwards_per_rollout,
    gather_seconds,
    iteration_flops,
    iteration_seconds,
    score_seconds,
    stage_seconds,
    training_flops,
    validation_seconds,
    whole_run,
)
from hyvideo.planning.planned_run import PlannedRun, num_validations
from hyvideo.settings.command_line import load_config
from tests.forked import ROOT

RELEASED = released_sizes("480p_t2v")
PAIRS = {"sp_size": 2, "batch_size": 2}
NFT = {"gate_interval": 0, "activation_checkpointing": "full", "objective": "nft", "nft_levels": 4}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def planned(name="hunyuanvideo15_480p_8gpu", world_size=8, hardware=None, **changes):
    config = load_config(f"configs/{name}.yaml", **changes)
    return PlannedRun(config, world_size, RELEASED, hardware=hardware or Hardware())


@pytest.mark.parametrize(
    "changes, forwards",
    [
        ({"activation_checkpointing": "full"}, 2 * (20 + 4 * 20 + 20)),
        ({"activation_checkpointing": "none"}, 2 * (20 + 3 * 20 + 20)),
        (
            {"activation_checkpointing": "full", "kl_weight": 0.0, "timestep_fraction": 0.5},
            2 * (20 + 4 * 10),
        ),
        ({"activation_checkpointing": "full", "anchor_fraction": 0.25}, 2 * (20 + 4 * 20 + 5)),
        (NFT, 2 * (20 + 5 * 4)),
        # two rollouts per replica, one checked
        (NFT | {"num_updates_per_rollout": 2}, 2 * (20 + 5 * 4 + 2 + 0.5)),
        (NFT | {"cfg_scale": 1.0, "anchor_cfg_scale": 6.0}, 20 + 4 * 4 + 2 * 4),
        # With shift 5 the first 12 of 20 steps begin above 0.8.
        ({"activation_checkpointing": "full", "guidance_interval": "0.8:1"}, 32 + 4 * 32 + 32),
    ],
)
def test_forward_passes_include_guidance_training_and_anchor(changes, forwards):
    assert forwards_per_rollout(planned(**PAIRS, **changes)) == forwards


def test_a_backward_pass_has_two_products_for_each_and_five_of_attention_for_two():
    run = planned(activation_checkpointing="none")
    forward = run.forward
    for changes, products, attention in (
        ({}, 3, 3.5),
        ({"lora_rank": 32}, 2, 3.5),
        ({"activation_checkpointing": "selective"}, 4, 3.5),
        ({"activation_checkpointing": "full"}, 4, 4.5),
    ):
        flops = training_flops(run.with_settings(**changes))
        assert flops.products == products * forward.products
        assert flops.attention == attention * forward.attention


def test_an_iteration_is_the_sum_of_its_rollouts():
    run = planned(activation_checkpointing="full")
    passes = 2 * 40 * run.forward.total + 40 * training_flops(run).total
    assert iteration_flops(run) == pytest.approx(8 * (passes + decode_flops(run)))


@pytest.mark.parametrize(
    "frames, height, width, tile, petaflops",
    [
        (121, 480, 848, 0, 1.24),
        (81, 480, 848, 256, 1.05),
    ],
)
def test_flops_of_decoding_match_torch(frames, height, width, tile, petaflops):
    size = {"sample_n_frames": frames, "height": height, "width": width}
    run = planned(**size, vae_tile_size=tile)
    assert decode_flops(run) / 1e15 == pytest.approx(petaflops, rel=0.02)


def test_a_forward_pass_is_within_15_percent_of_a_published_measurement():
    """vLLM-Omni on one H200, 121 frames of 480 x 832, 50 steps of two branches (its pull request
    1516).
    """
    size = {"sample_n_frames": 121, "height": 480, "width": 832}
    run = planned(world_size=1, hardware=hardware_of("H200"), **size)
    assert 100 * forward_seconds(run) + decode_seconds(run) == pytest.approx(259.4, rel=0.15)


def test_a_slow_network_delays_a_run_whose_shards_are_on_several_nodes():
    slow = Hardware(network=0.1)
    node = planned(world_size=8, hardware=slow)
    sharded = planned(world_size=64, hardware=slow)
    replicated = planned(world_size=64, hardware=slow, dp_replicate=8)
    fast = planned(world_size=64)
    assert iteration_seconds(node) == iteration_seconds(replicated) == iteration_seconds(fast)
    assert stage_seconds(sharded)["rollout"] == 1.05 * gather_seconds(sharded)["rollout"]
    # 40 forward passes gather 16.7 GB, of which 7/64 come from other nodes for each GPU of a node
    expected = 40 * 2 * sharded.parameters.total * 7 / 64 / 0.1e9
    assert gather_seconds(sharded)["rollout"] == pytest.approx(expected)
    batched = sharded.with_settings(batched_forward=True)
    assert gather_seconds(batched)["rollout"] == pytest.approx(expected / 2)


def test_hpsv3_takes_a_time_per_frame():
    """visual-rl reports 8.4 s for 81 frames on an L40S."""
    run = planned(world_size=1, hardware=hardware_of("L40S"), sample_n_frames=81)
    run = run.with_settings(gradient_accumulation_steps=4)
    all_frames = '{"hpsv3": {"num_frames": 0}}'
    every = run.with_settings(reward_model=["hpsv3"], reward_config=all_frames)
    assert score_seconds(every) == pytest.approx(8.4, rel=0.02)
    eight = run.with_settings(reward_model=["hpsv3"])
    assert score_seconds(eight) == pytest.approx(8 / 81 * score_seconds(every))
    assert stage_seconds(eight)["reward"] == pytest.approx(4 * 1.05 * score_seconds(eight))
    assert "reward" not in stage_seconds(run.with_settings(reward_model=["clip"]))
    as_held_out = run.with_settings(held_out_reward_model=["hpsv3"], reward_config=all_frames)
    more = validation_seconds(as_held_out, 8) - validation_seconds(run, 8)
    assert more == pytest.approx(8 * 1.05 * score_seconds(every))


def test_replicas_share_validation_videos_and_the_largest_share_counts():
    on = {
        gpus: validation_seconds(planned("paper/table2_b_8gpu", gpus), 64) for gpus in (8, 16, 64)
    }
    assert on[8] == pytest.approx(2 * on[16]) == pytest.approx(8 * on[64])
    run = planned("paper/table2_b_8gpu")
    assert validation_seconds(run, 57) == on[8] > validation_seconds(run, 56)


@pytest.mark.parametrize(
    "max_steps, interval, at_step0", [(100, 10, True), (5, 10, False), (101, 10, True)]
)
def test_the_number_of_validations_matches_the_trainer(max_steps, interval, at_step0):
    config = planned(validation_interval=interval, validate_at_step0=at_step0).config
    due = [i for i in range(1, max_steps + 1) if i % interval == 0 or i == max_steps]
    assert num_validations(config.validation, max_steps) == at_step0 + len(due)


def test_the_whole_run_is_the_sum_of_iterations_and_validations():
    run = planned("paper/table2_b_8gpu", validation_repeats=2)
    length = whole_run(run)
    assert (length.iterations, length.validations, length.validation_videos) == (100, 11, 64)
    assert length.seconds == pytest.approx(
        100 * iteration_seconds(run) + 11 * validation_seconds(run, 64)
    )
    assert length.gpu_hours == pytest.approx(8 * length.seconds / 3600)
    assert whole_run(run.with_settings(valid_video_csv=[])).validations == 0


@pytest.mark.parametrize("name", ["4090", "NVIDIA GeForce RTX 4090"])
def test_a_gpu_is_known_by_its_short_name_and_by_its_name_in_torch(name):
    assert hardware_of(name).rate == 145


def test_an_unknown_gpu_is_an_error_with_the_known_ones_and_has_no_hours():
    with pytest.raises(ValueError, match="gpu must be"):
        hardware_of("H20")
    unknown = hardware_of_device("NVIDIA H20", 90.0)
    assert unknown.gpu_memory == 90.0 and not replace(planned(), hardware=unknown).is_timed


def experts(**changes):
    config = load_config("configs/wan22_a14b_1gpu_24gb.yaml", **changes)
    sizes = released_sizes(config.model.transformer_version)
    return PlannedRun(config, 1, sizes, hardware=hardware_of("RTX 4090"))


FP8_BLOCKS = (
    14.08e9  # bytes of an expert's 40 blocks in fp8: 14.05e9 matrices, their scales and norms
)


def test_blocks_that_are_copied_longer_than_they_compute_set_the_time_of_the_rollout():
    """Two of four steps are the partner's."""
    short = {"sample_n_frames": 5, "height": 128, "width": 128}
    streamed = experts(**short)
    resident = streamed.with_settings(offload=["vae", "reward", "anchor", "policy"])
    added = stage_seconds(streamed)["rollout"] - stage_seconds(resident)["rollout"]
    copied = streamed.rollouts_per_replica * 2 * FP8_BLOCKS / 25e9
    assert streamed.partner_forwards == 2
    # computing, which the copies hide, takes the rest
    assert 0.8 * 1.05 * copied < added < 1.05 * copied
    # at the size of the config, a block computes longer than the next one is copied
    streamed = experts()
    resident = streamed.with_settings(offload=["vae", "reward", "anchor", "policy"])
    added = stage_seconds(streamed)["rollout"] - stage_seconds(resident)["rollout"]
    assert 0 < added < 0.1 * 1.05 * copied


def test_scorers_and_policy_that_leave_the_gpu_are_copied_once_per_iteration():
    run = experts()
    stays = run.with_settings(offload=["vae", "anchor", "partner"])
    added = stage_seconds(run)["reward"] - stage_seconds(stays)["reward"]
    assert added == pytest.approx(1.05 * (2 * 4.57e9 / 12.5e9 + 14.5e9 / 25e9), rel=0.02)
