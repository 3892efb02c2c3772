"""Intervals over seeds and prompts with Student's t, and their simulated coverage."""

import numpy as np
import pytest

from hyvideo.data.randomness import generator
from hyvideo.validation.intervals import Interval, half_widths, in_range, t_interval, t_quantile

SOURCES = ("seeds", "prompts", "rest")


def simulated_coverage(num_seeds, num_prompts, shares, num_tables=10_000):
    """Return the coverage in percent over simulated tables of mean 0, by ``shares`` of the variance
    of the mean.
    """
    random = generator("coverage", num_seeds, num_prompts, *map(str, shares))
    seeds, prompts, rest = np.sqrt(
        np.array(shares) * [num_seeds, num_prompts, num_seeds * num_prompts]
    )
    values = rest * random.standard_normal((num_tables, num_seeds, num_prompts))
    values += seeds * random.standard_normal((num_tables, num_seeds, 1))
    values += prompts * random.standard_normal((num_tables, 1, num_prompts))
    return 100 * np.mean(np.abs(values.mean((1, 2))) <= half_widths(values))


@pytest.mark.parametrize("source", SOURCES)
def test_coverage_is_93_to_97_percent_if_one_source_dominates(source):
    """The standard error of the simulated coverage is 0.2."""
    shares = [0.95 if name == source else 0.025 for name in SOURCES]
    assert 93 <= simulated_coverage(3, 8, shares) <= 97


@pytest.mark.parametrize(
    "shares",
    [(0.125, 0.875, 0.0), (0.0, 0.0, 1.0)],
)
def test_coverage_of_mixtures_is_conservative(shares):
    assert 94 <= simulated_coverage(3, 8, shares) <= 99


@pytest.mark.parametrize("freedom, bound", [(1, 12.7062), (95, 1.98525)])
def test_quantiles_match_published_tables(freedom, bound):
    assert t_quantile(freedom) == pytest.approx(bound, rel=3e-6)


def test_if_only_seeds_or_prompts_vary_the_interval_is_a_t_interval():
    numbers = np.array([1.0, 2.0, 4.0])
    half_width = 4.30265 * numbers.std(ddof=1) / np.sqrt(3)
    for values in (
        numbers[:, None].repeat(7, 1),
        numbers[None].repeat(5, 0),
        numbers[:, None],
        numbers[None],
    ):
        interval = t_interval(values)
        assert interval.mean == pytest.approx(7 / 3)
        assert interval.high - interval.mean == pytest.approx(half_width, rel=1e-5)
        assert interval.mean - interval.low == pytest.approx(half_width, rel=1e-5)


def test_the_interval_is_at_least_the_narrower_of_the_two_t_intervals():
    """For nearly equal means the difference of the squares is negative."""
    values = np.array([[1.0, -1.0, 0.2], [-1.0, 1.0, 0.0], [0.1, 0.0, 0.0]])
    over_seeds, over_prompts = (
        half_widths(means)
        for means in (values.mean(1, keepdims=True), values.mean(0, keepdims=True))
    )
    assert 0 < min(over_seeds, over_prompts) == pytest.approx(half_widths(values))


def test_a_prompt_with_a_missing_seed_is_left_out():
    nan = np.nan
    whole = np.array([[1.0, 3.0, 2.0], [2.0, 5.0, 3.0]])
    gaps = np.array([[1.0, 3.0, 9.0, 2.0], [2.0, 5.0, nan, 3.0]])
    assert t_interval(gaps) == t_interval(whole)
    for nothing in (np.array([[1.0, 2.0], [nan, nan]]), np.empty((2, 0)), np.empty((0, 0))):
        assert np.isnan(t_interval(nothing).mean)


def test_one_number_has_no_interval():
    interval = t_interval(np.array([[3.0]]))
    assert interval.mean == 3.0 and not interval.excludes_zero
    assert interval.as_json() == {"mean": 3.0, "low": None, "high": None}


@pytest.mark.parametrize("name", ["all_correct", "Diversity", "Frechet distance"])
def test_shares_and_distances_have_intervals_in_their_range(name):
    """Three seeds gave 0.937 [0.739, 1.136] all correct, and a distance of 0.037 [-0.159, 0.234]."""
    for values in ([0.85, 0.97, 0.99], [0.001, 0.002, 0.1]):
        plain = t_interval(np.array(values)[:, None])
        found = in_range(plain, name)
        assert plain.low < 0 or plain.high > 1
        assert 0 < found.low < found.mean == plain.mean < found.high
        assert found.high < 1 or name == "Frechet distance"
    assert in_range(plain, "reward") == plain


def test_an_interval_far_from_the_edge_of_its_range_hardly_changes():
    plain = Interval(0.4, 0.39, 0.41)
    for name in ("all_correct", "frechet_distance"):
        found = in_range(plain, name)
        assert (found.low, found.high) == pytest.approx((plain.low, plain.high), abs=2e-4)
        assert (found.low, found.high) != (plain.low, plain.high)


@pytest.mark.parametrize("name", ["all_correct", "frechet_distance"])
def test_intervals_in_their_range_cover_the_true_mean_of_five_seeds(name):
    random = generator("coverage", name)
    if name == "all_correct":
        mean, tables = 0.95, random.beta(19, 1, (4000, 5))
    else:
        mean, tables = np.exp(0.5**2 / 2), random.lognormal(0.0, 0.5, (4000, 5))
    found = [in_range(t_interval(table[:, None]), name) for table in tables]
    covered = np.mean([interval.low <= mean <= interval.high for interval in found])
    assert 0.92 < covered < 0.98, covered
