"""Quantities derived from settings; legal runs are those that post_train.py accepts, nearest first."""

from itertools import islice
from pathlib import Path

import pytest

from hyvideo.config.command_line import load_config
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.rules import batch_problems
from hyvideo.models.hunyuan_video15.sizes import Architecture

RELEASED = Architecture()
CONFIG = load_config(Path(__file__).parents[3] / "configs" / "hunyuanvideo15_480p_8gpu.yaml", sp_size=2, batch_size=2)


def run_of(world_size, **changes):
    return PlannedRun(CONFIG.with_settings(**changes), world_size, RELEASED)


def layout(run):
    return run.world_size, run.settings.sp_size, run.settings.batch_size, run.settings.num_generations


def test_quantities_derived_from_the_shipped_config():
    run = run_of(8)
    assert (run.replicas, run.num_shards, run.rollouts_per_replica, run.plan.num_trained_steps) == (4, 8, 2, 20)
    assert run.backwards_per_update == 2 * 20
    assert run.checkpointing == "auto" and run_of(8, enable_gradient_checkpointing=False).checkpointing == "none"
    assert run_of(8, dp_replicate=2).num_shards == 4


def test_batch_sizes_and_calls_with_and_without_batching():
    apart, together = run_of(8), run_of(8, batched_forward=True)
    assert (apart.samples_at_once(3), apart.num_calls(3, 2)) == (1, 6)
    assert (together.samples_at_once(3), together.num_calls(3, 2)) == (6, 1)
    assert run_of(8, device="cpu").num_calls(3, 2) == 1


@pytest.mark.parametrize(
    "changes, gigabytes",
    [
        ({}, 4.57),
        ({"reward_precision": "fp32_math"}, 9.2),
        ({"remote_reward_url": "http://127.0.0.1:8000"}, 0),
        ({"reward_model": ["videoalign", "clip"]}, 4.57 + 1.72),
    ],
)
def test_only_local_reward_models_count(changes, gigabytes):
    assert run_of(8, **changes).reward_bytes == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize("world_size, sp_size", [(8, 2), (64, 8), (7, 2), (1, 2), (9, 4), (12, 3)])
def test_nearby_runs_are_legal_and_the_nearest_is_first(world_size, sp_size):
    requested = run_of(world_size, sp_size=sp_size)
    found = list(islice(requested.legal_near(), 10))
    assert found
    for near in found:
        sp_size = near.settings.sp_size
        assert near.world_size == near.replicas * sp_size and sp_size <= RELEASED.num_attention_heads
        rollout, distributed, loss = near.config.rollout, near.config.distributed, near.config.loss
        assert not list(batch_problems(rollout, distributed, loss.num_updates_per_rollout, near.world_size))
    if not requested.problems:
        assert found[0] == requested


def test_fewer_doublings_come_first():
    near = [layout(run) for run in run_of(8).legal_near()]
    assert near[0] == (8, 2, 2, 4)
    assert near.index((8, 1, 2, 4)) < near.index((4, 2, 2, 4))  # a change of world_size counts twice
    assert near.index((8, 2, 4, 4)) < near.index((8, 2, 4, 8))


def test_nearby_runs_of_an_odd_world_size_include_adjacent_multiples():
    found = list(run_of(7).legal_near())
    assert {6, 7, 8} <= {near.world_size for near in found}
    assert layout(found[0]) == (8, 2, 2, 4)
    assert str(found[0]) == "world_size 8, sp_size 2, batch_size 2, num_generations 4 (4 replicas)"


@pytest.mark.parametrize(
    "world_size, changes, words",
    [
        (7, {}, "sp_size must divide the number of processes, got sp_size 2 and 7"),
        (34, {"sp_size": 17}, "must be at most the 16 attention heads of the transformer, got 17"),
        (8, {"batch_size": 3}, "batch_size must be a multiple or a divisor of num_generations"),
        (8, {"dp_replicate": 3}, "dp_replicate must divide the 4 data-parallel replicas"),
        (8, {"num_generations": 1}, "at least 2"),
    ],
)
def test_the_reason_for_an_illegal_run_is_reported(world_size, changes, words):
    assert any(words in problem for problem in run_of(world_size, **changes).problems)


def test_an_uneven_split_of_heads_is_legal():
    assert not run_of(12, sp_size=3, batch_size=4).problems
