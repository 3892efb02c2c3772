"""The registry of scorers is read before torch is loaded; the weighted sum of their dimensions."""

import math
import subprocess
import sys

import pytest

from hyvideo.models.reward_models.rewards import DIMENSIONS, Reward, weighted


def test_the_registry_and_the_versions_are_read_without_torch():
    modules = "hyvideo.models.reward_models.rewards, hyvideo.models.versions"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_reward_is_the_weighted_sum_of_what_has_a_weight():
    scores = {"VQ": 1.0, "MQ": math.nan, "TA": -2.0}
    assert weighted(scores, {"VQ": 0.5, "TA": 2.0, "MQ": 0.0}) == -3.5
    assert math.isnan(weighted(scores, {"VQ": 0.5, "MQ": 1.0}))
    assert math.isnan(weighted(scores, {"CLIP": 1.0}))


def test_the_overall_score_has_no_weights_and_is_nan_where_a_dimension_lacks():
    assert Reward(0.0, dict(zip(DIMENSIONS, (1.0, 2.0, 4.0)))).overall == pytest.approx(7)
    assert math.isnan(Reward(0.0, {"VQ": 1.0, "MQ": 2.0}).overall)
