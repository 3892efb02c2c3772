"""FLOPs as torch counts them on the real model, and what an iteration makes of them."""

from pathlib import Path

import pytest

from hyvideo.config.command_line import load_config
from hyvideo.config.memory.cost import cost, decode_flops, forward_flops, seconds
from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.run_plan import make_plan
from tests.config.memory.simulated import simulated

CONFIG = Path(__file__).parents[3] / "configs" / "hunyuanvideo15_480p_8gpu.yaml"
RELEASED = Architecture()


def planned(**changes):
    return PlannedRun(load_config(CONFIG, **changes), 8, RELEASED)


def test_a_forward_of_49290_tokens():
    forward = forward_flops(49_290, 0, RELEASED)
    assert forward.total / 1e12 == pytest.approx(1343, rel=1e-3)
    assert forward.attention / 1e12 == pytest.approx(1075, rel=1e-3)


@pytest.mark.parametrize(
    "tokens, text, linear, attention",  # TFLOP, by torch's FlopCounter
    [(14_040, 150, 77, 89), (33_390, 1985, 192, 554), (49_290, 1985, 279, 1163), (111_600, 150, 608, 5524)],
)
def test_forwards_are_as_counted_by_torch(tokens, text, linear, attention):
    forward = forward_flops(tokens, text, RELEASED)
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
def test_decoding_is_as_counted_by_torch(frames, height, width, tile, petaflops):
    run = simulated(sample_n_frames=frames, height=height, width=width, vae_tile_size=tile)
    assert decode_flops(run) / 1e15 == pytest.approx(petaflops, rel=0.02)


@pytest.mark.parametrize(
    "changes", [{}, {"enable_gradient_checkpointing": False}, {"cfg_scale": 1.0}, {"kl_weight": 0.0}]
)
def test_forwards_per_rollout_are_those_of_the_plan(changes):
    run = planned(**changes)
    assert cost(run).forwards_per_rollout == make_plan(run.config, 8).forwards_per_rollout


def test_selective_checkpointing_recomputes_all_but_attention():
    checkpointing = (
        {"enable_gradient_checkpointing": False},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
    )
    none, selective, full = (cost(simulated(**changes)).forwards_per_rollout for changes in checkpointing)
    recomputed = (selective - none) / (full - none)
    assert recomputed == pytest.approx(0.2, abs=0.01)


def test_an_iteration_is_the_sum_of_its_rollouts():
    spent = cost(planned())
    assert spent.rollouts == 8
    assert spent.flops == 8 * (240 * spent.forward.total + spent.decode_flops)


def test_time_falls_with_the_rate_and_with_ranks_but_text_and_decoding_are_repeated():
    run = planned()
    assert seconds(run, 200.0) == pytest.approx(2 * seconds(run, 400.0))
    per_rollout = [seconds(run.with_settings(sp_size=s), 400.0) * s for s in (1, 2, 4)]
    assert per_rollout == sorted(per_rollout) and per_rollout[-1] < 1.1 * per_rollout[0]
    without_sp = run.with_settings(sp_size=1)
    assert seconds(without_sp, 400.0) * 8 * 400e12 == pytest.approx(cost(without_sp).flops)
    assert seconds(run, 400.0) * 8 * 400e12 > cost(run).flops
