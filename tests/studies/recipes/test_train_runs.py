"""What a study says while it trains."""

from studies.recipes.train_runs import time_left


def test_the_time_left_is_the_mean_of_the_runs_so_far_for_those_that_are_left():
    assert time_left([100.0, 140.0], num_runs=8, jobs=1) == "6 runs left, about 12 minutes"
    assert time_left([100.0, 140.0], num_runs=8, jobs=3) == "6 runs left, about 4 minutes"
    assert time_left([100.0], num_runs=2, jobs=1) == "1 run left, about 2 minutes"
    assert time_left([5.0], num_runs=1, jobs=1) == "no run left"
