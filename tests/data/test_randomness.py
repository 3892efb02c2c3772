"""Tests of random numbers keyed by their purpose."""

import torch

from hyvideo.data.randomness import normal, permutation

KEY = (930, "initial noise", 1)
FIRST_NUMBERS = [0.26403725147247314, 0.5982527136802673, -2.9058613777160645, 0.40236151218414307]


def test_numbers_are_the_same_on_every_machine():
    """Stored numbers: if they change, no earlier run can be reproduced."""
    assert normal((4,), *KEY).tolist() == FIRST_NUMBERS
    assert permutation(6, 930, "order", 1) == [5, 0, 3, 1, 2, 4]


def test_draws_do_not_depend_on_each_other_or_on_the_global_generators():
    first = normal((3, 5), *KEY)
    torch.manual_seed(1)
    normal((7,), 930, "something else")
    assert torch.equal(normal((3, 5), *KEY), first)
    state = torch.get_rng_state()
    normal((3, 5), *KEY)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_part_of_the_key_matters():
    keys = [
        (0, "a", 1, 2),
        (1, "a", 1, 2),
        (0, "b", 1, 2),
        (0, "a", 2, 1),
        (0, "a", 12),
        (0, "a", 1, 2, 0),
    ]
    keys += [(0, "a", "1", 2), (0, "a, 1", 2)]
    draws = {tuple(normal((4,), *key).tolist()) for key in keys}
    assert len(draws) == len(keys)


def test_normal_numbers_are_standard_float32_on_the_cpu():
    numbers = normal((100, 1000), 0, "moments")
    assert (
        numbers.dtype == torch.float32
        and numbers.shape == (100, 1000)
        and numbers.device.type == "cpu"
    )
    assert abs(numbers.mean().item()) < 0.01
    assert abs(numbers.var().item() - 1) < 0.02
    assert abs((numbers**4).mean().item() - 3) < 0.1


def test_draws_of_neighboring_keys_are_uncorrelated():
    draws = torch.stack([normal((20_000,), 0, "noise", i) for i in range(6)])
    correlation = torch.corrcoef(draws) - torch.eye(6)
    assert correlation.abs().max() < 0.03


def test_permutations_are_uniformly_distributed():
    orders = [tuple(permutation(3, 0, "order", i)) for i in range(1200)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6 and min(counts) > 150 and max(counts) < 250
