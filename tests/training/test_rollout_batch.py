"""Distribution of rollouts over replicas, their noise, and the order of their trained steps."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from hyvideo.distributed.mesh import Mesh
from hyvideo.settings.config import Config
from hyvideo.settings.objectives import GRPOSettings
from hyvideo.settings.sections import DataSettings
from hyvideo.training.rollout_batch import (
    RolloutBatch,
    RolloutIndex,
    RolloutNoise,
    indices_of_replica,
    timestep_permutations,
)

SHAPE = (2, 3)
STEPS = [0, 1, 3, 4]
INDICES = [RolloutIndex(0, 0), RolloutIndex(0, 1), RolloutIndex(1, 0)]


def config(**settings):
    return Config().with_settings(**settings)


def test_consecutive_rollouts_share_a_group_and_replicas_and_batches_split_the_iteration():
    settings = config(batch_size=2, num_generations=4, gradient_accumulation_steps=2)
    places = [indices_of_replica(settings.rollout, Mesh(rank, 4, 1)) for rank in range(4)]
    # two of each rank in the first batch, then two of each in the second one
    in_order = [part[first : first + 2] for first in (0, 2) for part in places]
    assert [place for part in in_order for place in part] == [
        RolloutIndex(*divmod(number, 4)) for number in range(16)
    ]


def test_ranks_that_share_a_video_have_the_same_rollouts():
    settings = config(batch_size=2, num_generations=2)
    assert indices_of_replica(settings.rollout, Mesh(2, 4, 2)) == indices_of_replica(
        settings.rollout, Mesh(3, 4, 2)
    )


@pytest.mark.parametrize("same", [False, True])
def test_the_rollouts_of_a_group_share_initial_noise_only_if_set(same):
    noise = RolloutNoise(42, SHAPE, is_shared=same)
    first, second = (noise.initial(1, RolloutIndex(0, member)) for member in range(2))
    assert torch.equal(first, second) == same
    assert not torch.equal(first, noise.initial(1, RolloutIndex(1, 0)))
    assert not torch.equal(first, noise.initial(2, RolloutIndex(0, 0)))
    assert not torch.equal(first, RolloutNoise(43, SHAPE).initial(1, RolloutIndex(0, 0)))


def test_step_noise_differs_even_with_shared_initial_noise():
    """It depends on seed, iteration, group, member and step."""
    noise = RolloutNoise(42, SHAPE, is_shared=True)
    draws = [noise.for_step(*key) for key in product((1, 2), INDICES, (0, 1))]
    draws.append(RolloutNoise(43, SHAPE, is_shared=True).for_step(1, RolloutIndex(0, 0), 0))
    assert not any(torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


def test_the_noise_that_renoises_a_rollout_depends_on_seed_iteration_group_member_and_column():
    draws = [
        RolloutNoise(42, SHAPE).for_renoising(*key) for key in product((1, 2), INDICES, (0, 1))
    ]
    draws.append(RolloutNoise(43, SHAPE).for_renoising(1, RolloutIndex(0, 0), 0))
    assert not any(torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])
    assert torch.equal(draws[0], RolloutNoise(42, SHAPE).for_renoising(1, RolloutIndex(0, 0), 0))


def test_updates_alternate_over_groups_and_every_group_is_first_in_some_iterations():
    """With two updates, the groups of the first update of iteration 1 are those of the second
    update of iteration 2.
    """
    indices = [RolloutIndex(group, member) for group in range(4) for member in range(2)]
    batch = RolloutBatch(indices, [], None, None, None, None, advantages=torch.zeros(8))
    rows = {
        (iteration, update): replace(batch, iteration=iteration).rows_of_update(update, 2)
        for iteration in (1, 2)
        for update in (0, 1)
    }
    assert rows[1, 0] == rows[2, 1] == [2, 3, 6, 7] and rows[1, 1] == rows[2, 0] == [0, 1, 4, 5]


def test_rollouts_without_an_advantage_are_not_trained():
    indices = [RolloutIndex(0, member) for member in range(3)]
    advantages = torch.tensor([0.0, torch.nan, 1.0])
    batch = RolloutBatch(indices, [], None, None, None, None, advantages=advantages)
    assert batch.rows_of_update(0, 1) == [0, 2]


def test_anchor_columns_are_uniform_new_in_each_iteration_and_the_same_on_all_ranks():
    noise = RolloutNoise(42, SHAPE)
    draws = [noise.anchor_columns(iteration, 5, 2) for iteration in range(1, 1001)]
    assert all(len(set(draw)) == 2 and draw == sorted(draw) for draw in draws)
    counts = [sum(column in draw for draw in draws) for column in range(5)]
    assert all(abs(count - 400) < 5 * (1000 * 0.4 * 0.6) ** 0.5 for count in counts)
    assert draws == [
        RolloutNoise(42, (9,)).anchor_columns(iteration, 5, 2) for iteration in range(1, 1001)
    ]
    assert noise.anchor_columns(1, 3, 3) == [0, 1, 2]


def test_every_rollout_trains_every_stochastic_step_in_its_own_order():
    places = [RolloutIndex(0, member) for member in range(8)]
    orders = timestep_permutations(GRPOSettings(), DataSettings(), 1, places, STEPS, len(STEPS))
    assert orders.shape == (8, 4)
    assert all(sorted(order) == STEPS for order in orders.tolist())
    assert len({tuple(order) for order in orders.tolist()}) > 1
    assert torch.equal(
        orders, timestep_permutations(GRPOSettings(), DataSettings(), 1, places, STEPS, len(STEPS))
    )
    assert not torch.equal(
        orders, timestep_permutations(GRPOSettings(), DataSettings(), 2, places, STEPS, len(STEPS))
    )


def test_without_permutation_steps_follow_the_order_of_the_schedule():
    orders = timestep_permutations(
        GRPOSettings(enable_timestep_permutation=False),
        DataSettings(),
        1,
        [RolloutIndex(0, 0), RolloutIndex(0, 1)],
        STEPS,
        4,
    )
    assert orders.tolist() == [STEPS, STEPS]


@pytest.mark.parametrize("permuted", [False, True])
def test_a_fraction_of_the_steps_is_trained(permuted):
    settings = config(enable_timestep_permutation=permuted)
    orders = timestep_permutations(
        settings.objective,
        settings.data,
        1,
        [RolloutIndex(0, member) for member in range(6)],
        STEPS,
        2,
    )
    assert orders.shape == (6, 2)
    assert all(len(set(order)) == 2 and set(order) <= set(STEPS) for order in orders.tolist())
    if permuted:
        # different steps for different rollouts
        assert set(orders.flatten().tolist()) == set(STEPS)
