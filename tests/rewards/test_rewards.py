"""Tests of the registry of scorers, custom scorers, and the weighted sum of dimensions."""

import math

import pytest

from hyvideo.rewards.rewards import DIMENSIONS, make_scorer, overall, weighted_sum
from hyvideo.settings.reward_settings import reward_problems
from hyvideo.settings.sections import RewardSettings


def test_the_reward_is_the_sum_over_weighted_dimensions():
    scores = {"VQ": 1.0, "MQ": math.nan, "TA": -2.0}
    assert weighted_sum(scores, {"VQ": 0.5, "TA": 2.0, "MQ": 0.0}) == -3.5
    assert math.isnan(weighted_sum(scores, {"VQ": 0.5, "MQ": 1.0}))
    assert math.isnan(weighted_sum(scores, {"CLIP": 1.0}))


def test_the_overall_score_is_unweighted_and_needs_all_dimensions():
    assert overall(dict(zip(DIMENSIONS, (1.0, 2.0, 4.0))), "sum") == {"sum": 7}
    assert (
        overall({"VQ": 1.0, "MQ": 2.0}, "sum")
        == overall({"VQ": 1.0, "MQ": 2.0, "TA": "3"}, "sum")
        == {}
    )
    assert math.isnan(overall({"VQ": 1.0, "MQ": 2.0, "TA": math.nan}, "sum")["sum"])


CUSTOM = """
from dataclasses import dataclass
from hyvideo.rewards.rewards import Scorer

@dataclass
class Own(Scorer):
    scale: "float"
    device: "object"
    root: "str" = ""
    path: str = ""

class Plain(Scorer): ...
class NoScorer:
    def score(self, videos, prompts, *, fps): ...
number = 3

def bright(videos, prompts, fps, scale: float = 1.0, device=None):
    return [scale for _ in videos]
"""


@pytest.fixture
def custom(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(CUSTOM)
    (tmp_path / "broken_rewards.py").write_text("class Broken(:\n")
    (tmp_path / "needy_rewards.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("place", ["own_rewards.py", "own_rewards"])
def test_a_class_in_a_file_or_module_is_a_scorer_with_its_parameters_as_options(custom, place):
    scorer = make_scorer(f"{place}:Own", "ckpts", device="cpu", scale=2.0, path="weights")
    assert (scorer.scale, scorer.device, scorer.root, scorer.path) == (
        2.0,
        "cpu",
        "ckpts",
        "weights",
    )
    make_scorer(f"{place}:Plain", "ckpts").check_prompts(["a"])
    # the file is imported once
    assert isinstance(make_scorer(f"{place}:Own", "ckpts", scale=1.0), type(scorer))
    with pytest.raises(ValueError, match=f"{place}:Own .*depth"):
        make_scorer(f"{place}:Own", "ckpts", scale=1.0, depth=3)
    with pytest.raises(ValueError, match=f"{place}:Own .*scale"):
        make_scorer(f"{place}:Own", "ckpts")


def test_a_function_in_a_file_is_a_scorer_with_its_other_parameters_as_options(custom):
    name = "own_rewards.py:bright"
    scorer = make_scorer(name, "ckpts", device="cpu", scale=2.0)
    assert scorer.dimensions == ("bright",)
    assert scorer.score([None] * 2, ["a", "b"], fps=8.0) == [{"bright": 2.0}] * 2


def test_a_scorer_whose_file_is_missing_is_rejected_before_a_run(custom):
    name = "nowhere.py:Own"
    (problem,) = reward_problems(RewardSettings(reward_model=[name]))
    assert problem.startswith("reward_model") and "nowhere.py" in problem
    with pytest.raises(ValueError, match="nowhere.py"):
        make_scorer(name, "ckpts")
