import numpy as np
import pytest

from hyvideo.evaluation.table2.bootstrap import bootstrap_interval, redrawn_means

RANDOM = np.random.default_rng(0)


def test_redrawn_means_spread_as_the_closed_form_says():
    by_seed, by_prompt = RANDOM.normal(size=5), RANDOM.normal(size=30)
    means = redrawn_means(by_seed[:, None] + by_prompt, seed=1, num_resamples=40_000)
    assert means.var() == pytest.approx(by_seed.var() / 5 + by_prompt.var() / 30, rel=0.03)


def test_with_one_seed_the_interval_is_that_of_the_mean_over_prompts():
    values = RANDOM.normal(2.0, 0.5, size=(1, 400))
    interval = bootstrap_interval(values)
    half_width = 1.96 * values.std() / 20
    assert interval.mean == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half_width, abs=0.1 * half_width)
    assert interval.high == pytest.approx(values.mean() + half_width, abs=0.1 * half_width)


def test_training_the_same_thrice_makes_nothing_surer():
    values = RANDOM.normal(size=(1, 50))
    once, thrice = bootstrap_interval(values), bootstrap_interval(values.repeat(3, axis=0))
    assert thrice.high - thrice.low == pytest.approx(once.high - once.low, rel=0.06)


def test_missing_values_count_neither_in_the_mean_nor_in_the_interval():
    values = np.array([[1.0, np.nan, 3.0], [1.0, 3.0, np.nan]])
    interval = bootstrap_interval(values)
    assert interval.mean == 2.0 and 1.0 <= interval.low <= 2.0 <= interval.high <= 3.0
    assert np.isnan(bootstrap_interval(np.full((2, 2), np.nan)).mean)


def test_equal_seeds_give_equal_intervals():
    values = RANDOM.normal(size=(3, 20))
    assert bootstrap_interval(values, seed=4) == bootstrap_interval(values, seed=4)
    assert bootstrap_interval(values, seed=4) != bootstrap_interval(values, seed=5)
