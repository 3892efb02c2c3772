"""Legal combinations are those that post_train.py takes, nearest first."""

from dataclasses import replace
from pathlib import Path

import pytest

from hyvideo.config.command_line import load_config
from hyvideo.config.memory.legal import Combination, combinations_near, problems
from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.run_shape import RunShape
from hyvideo.config.rules import batch_problems

RELEASED = Architecture()
CONFIG = load_config(Path(__file__).parents[3] / "configs" / "hunyuanvideo15_480p_8gpu.yaml")


def shape_of(world_size, **changes):
    return replace(RunShape.of(CONFIG, world_size), **changes)


@pytest.mark.parametrize("world_size, sp_size", [(8, 2), (64, 8), (7, 2), (1, 2), (9, 4), (12, 3)])
def test_every_combination_near_is_legal_and_the_nearest_is_first(world_size, sp_size):
    shape = shape_of(world_size, sp_size=sp_size)
    asked = Combination.of(shape)
    found = combinations_near(CONFIG, shape, RELEASED, limit=10)
    assert found
    for near in found:
        assert near.world_size == near.replicas * near.sp_size and RELEASED.num_heads % near.sp_size == 0
        settings = {"sp_size": near.sp_size, "batch_size": near.batch_size, "num_generations": near.num_generations}
        config = CONFIG.with_settings(**settings)
        updates = config.loss.num_updates_per_rollout
        assert not list(batch_problems(config.rollout, config.distributed, updates, near.world_size))
    distances = [near.distance(asked) for near in found]
    assert distances == sorted(distances)


def test_the_asked_combination_is_first_when_it_is_legal():
    assert combinations_near(CONFIG, shape_of(8), RELEASED, limit=3)[0] == Combination(8, 2, 2, 4)


def test_an_odd_world_is_led_to_the_multiples_beside_it():
    found = combinations_near(CONFIG, shape_of(7), RELEASED, limit=100)
    assert {6, 7, 8} <= {near.world_size for near in found}
    assert found[0] == Combination(8, 2, 2, 4)


@pytest.mark.parametrize(
    "world_size, changes, said",
    [
        (7, {}, "must be a multiple of sp_size, got 7"),
        (12, {"sp_size": 3}, "must divide the 16 attention heads, got 3"),
        (8, {"batch_size": 3}, "whole groups"),
        (8, {"dp_replicate": 3}, "dp_replicate must divide the 4 replicas, got 3"),
        (8, {"num_generations": 1}, "at least 2"),
    ],
)
def test_what_is_not_legal_is_named(world_size, changes, said):
    assert any(said in problem for problem in problems(CONFIG, shape_of(world_size, **changes), RELEASED))
