"""FLOPs, compared with torch's counter on the real model, and seconds of an iteration."""

from dataclasses import replace
from pathlib import Path

import pytest

from hyvideo.config.command_line import load_config
from hyvideo.config.memory.cost import (
    cost,
    decode_flops,
    duration,
    scoring_flops,
    stage_flops,
    training_flops,
    training_forwards,
)
from hyvideo.config.memory.hardware import Hardware
from hyvideo.config.memory.network import traffic
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.models.hunyuan_video15.sizes import Architecture
from tests.config.memory.simulated import simulated

CONFIG = Path(__file__).parents[3] / "configs" / "hunyuanvideo15_480p_8gpu.yaml"
RELEASED = Architecture()
NFT = {"activation_checkpointing": "full", "objective": "nft", "nft_levels": 4}


def planned(rate=400.0, **changes):
    return PlannedRun(load_config(CONFIG, **changes), 8, RELEASED, hardware=Hardware(rate=rate))


def test_flops_of_a_forward_pass_of_49290_tokens():
    forward = RELEASED.forward(49_290, 0)
    assert forward.total / 1e12 == pytest.approx(1343, rel=1e-3)
    assert forward.attention / 1e12 == pytest.approx(1075, rel=1e-3)


@pytest.mark.parametrize(
    "tokens, text, linear, attention",  # TFLOP of torch's FlopCounter
    [(14_040, 150, 77, 89), (33_390, 1985, 192, 554), (49_290, 1985, 279, 1163), (111_600, 150, 608, 5524)],
)
def test_flops_of_forward_passes_match_torch(tokens, text, linear, attention):
    forward = RELEASED.forward(tokens, text)
    assert (forward.image + forward.text) / 1e12 == pytest.approx(linear, rel=0.01)
    assert forward.attention / 1e12 == pytest.approx(attention, rel=0.01)


@pytest.mark.parametrize(
    "frames, height, width, tile, petaflops",
    [
        (81, 256, 256, 256, 0.133),
        (81, 480, 848, 0, 0.83),
        (121, 480, 848, 0, 1.24),
        (121, 720, 1280, 0, 2.8),
        (81, 480, 848, 256, 1.05),
    ],
)
def test_flops_of_decoding_match_torch(frames, height, width, tile, petaflops):
    run = simulated(sample_n_frames=frames, height=height, width=width, vae_tile_size=tile)
    assert decode_flops(run) / 1e15 == pytest.approx(petaflops, rel=0.02)


@pytest.mark.parametrize(
    "changes, forwards",
    [
        ({"activation_checkpointing": "full"}, 2 * (20 + 4 * 20 + 20)),
        ({"enable_gradient_checkpointing": False}, 2 * (20 + 3 * 20 + 20)),
        ({"activation_checkpointing": "full", "cfg_scale": 1.0}, 20 + 4 * 20 + 20),
        ({"activation_checkpointing": "full", "kl_weight": 0.0, "timestep_fraction": 0.5}, 2 * (20 + 4 * 10)),
        ({"activation_checkpointing": "full", "anchor_fraction": 0.25}, 2 * (20 + 4 * 20 + 5)),
        ({"activation_checkpointing": "full", "timestep_fraction": 0.1, "anchor_fraction": 0.01}, 2 * (20 + 4 * 2 + 1)),
        (NFT, 2 * (20 + 5 * 4)),
        (NFT | {"nft_levels": 2}, 2 * (20 + 5 * 2)),
        (NFT | {"kl_weight": 0.0}, 2 * (20 + 4 * 4)),
        (NFT | {"anchor_fraction": 0.25}, 2 * (20 + 4 * 4 + 1)),
        (NFT | {"num_updates_per_rollout": 2}, 2 * (20 + 5 * 4 + 2 + 0.5)),  # two rollouts per replica, one checked
        # With shift 5 the first 12 of 20 steps begin above 0.8.
        ({"activation_checkpointing": "full", "guidance_interval": "0.8:1"}, 32 + 4 * 32 + 32),
    ],
)
def test_forward_passes_include_guidance_training_and_anchor(changes, forwards):
    assert cost(planned(**changes)).forwards_per_rollout == forwards


def test_selective_checkpointing_recomputes_all_but_attention():
    checkpointing = (
        {"enable_gradient_checkpointing": False},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
    )
    none, selective, full = (training_forwards(simulated(**changes)) for changes in checkpointing)
    assert (none, full) == (3, 4) and selective == pytest.approx(3.2, abs=0.01)


def test_an_iteration_is_the_sum_of_its_rollouts():
    spent = cost(planned())
    assert spent.rollouts == 8
    assert spent.video_flops == decode_flops(planned()) + scoring_flops(planned())
    assert spent.flops == 8 * (spent.forwards_per_rollout * spent.forward.total + spent.video_flops)


def test_flops_of_the_stages_are_those_of_a_rank():
    run = planned(**NFT, num_updates_per_rollout=2, sp_size=1, cfg_scale=1.0)
    forward, stages = RELEASED.forward(run.image_tokens, 300), stage_flops(run)
    assert stages["rollout"] == 2 * 20 * forward.total and stages["anchor"] == 2 * (4 + 2.5) * forward.total
    assert stages["update"] == 2 * 4 * training_flops(run).total
    assert training_flops(run).total == 4 * forward.products + 4.5 * forward.attention
    assert stages["decode"] == 2 * decode_flops(run)
    pairs = stage_flops(run.with_settings(sp_size=2))
    assert pairs["decode"] == stages["decode"] / 2
    for stage in ("rollout", "anchor", "update"):  # text is repeated on both ranks
        assert stages[stage] / 2 < pairs[stage] < 0.51 * stages[stage]


def test_time_falls_with_the_rate_and_with_ranks_but_text_and_decoding_are_repeated():
    run = planned()
    assert duration(planned(rate=200.0)).computing == pytest.approx(2 * duration(run).computing)
    per_rollout = [duration(run.with_settings(sp_size=s)).computing * s for s in (1, 2, 4)]
    assert per_rollout == sorted(per_rollout) and per_rollout[-1] < 1.1 * per_rollout[0]
    without_sp = run.with_settings(sp_size=1)
    assert duration(without_sp).computing * 8 * 400e12 == pytest.approx(cost(without_sp).flops)
    assert duration(run).computing * 8 * 400e12 > cost(run).flops


def test_videoalign_sees_two_frames_a_second_and_a_service_computes_elsewhere():
    short, long = (scoring_flops(planned(sample_n_frames=frames)) for frames in (81, 161))
    assert short == pytest.approx(9.5e12, rel=0.01) and long - short == pytest.approx(80 / 24 * 2.03e12, rel=0.01)
    assert scoring_flops(planned(remote_reward_url="http://127.0.0.1:8000")) == 0 == scoring_flops(simulated())


def test_the_longer_of_computing_and_gathering_counts_and_token_exchanges_always_do():
    fast, slow = (replace(planned(), hardware=Hardware(link=link)) for link in (450.0, 10.0))
    waits, stalls = duration(fast), duration(slow)
    assert waits.waiting == pytest.approx(traffic(fast).exchanged / 450e9)
    assert stalls.waiting > stalls.network - stalls.computing > 0
    assert duration(planned(sp_size=1)).waiting == 0 and stalls.total == stalls.computing + stalls.waiting
