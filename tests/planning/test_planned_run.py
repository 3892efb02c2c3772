"""Quantities derived from settings; legal runs are those that post_train.py accepts."""

from pathlib import Path

import pytest

from hyvideo.models.sizes import released_sizes
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import load_config

RELEASED = released_sizes("480p_t2v")
CONFIG = load_config(
    Path(__file__).parents[2] / "configs" / "hunyuanvideo15_480p_8gpu.yaml", sp_size=2, batch_size=2
)


def run_of(world_size, **changes):
    return PlannedRun(CONFIG.with_settings(**changes), world_size, RELEASED)


def test_batch_sizes_and_calls_with_and_without_batching():
    apart, together = run_of(8), run_of(8, batched_forward=True)
    assert apart.samples_at_once(3) == 1
    assert together.samples_at_once(3) == 6
    assert run_of(8, device="cpu").samples_at_once(3) == 6


@pytest.mark.parametrize(
    "changes, gigabytes",
    [
        ({"reward_model": ["remote"]}, 0),
        ({"reward_model": ["remote", "clip"]}, 1.72),
        ({"reward_model": ["videoalign", "clip"]}, 4.57 + 1.72),
        ({"reward_model": ["hpsv3"]}, 15.49),
        (
            {"reward_model": ["hpsv3"], "reward_config": '{"hpsv3": {"precision": "fp32_math"}}'},
            30.98,
        ),
    ],
)
def test_only_local_reward_models_count(changes, gigabytes):
    assert run_of(8, **changes).reward_bytes == pytest.approx(gigabytes * 1e9)
