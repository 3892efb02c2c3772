"""Names of the scorers' dimensions: no score of one scorer replaces that of another."""

import pytest
import torch

from hyvideo.rewards.rewards import Scorer
from hyvideo.rewards.scoring import AsyncScorer

VIDEO = torch.zeros(4, 3, 16, 16, dtype=torch.uint8)


class Fixed(Scorer):
    """Returns constant scores."""

    def __init__(self, dimensions=None, **scores):
        self.scores = scores
        if dimensions:
            self.dimensions = dimensions

    def score(self, videos, prompts, *, fps):
        return [dict(self.scores) for _ in videos]


def reward(scorers, weights, **options):
    scorer = AsyncScorer(scorers, weights, **options)
    (found,) = scorer.measure([VIDEO], ["a"], fps=8.0)
    scorer.close()
    return found


A = Fixed(VQ=1.0, MQ=2.0, TA=4.0, Overall=7.0)
Z = Fixed(VQ=10.0, MQ=20.0, TA=40.0, Overall=70.0)


@pytest.mark.parametrize("reverse", [False, True])
def test_weights_by_scorer_count_as_written_in_any_order(reverse):
    pairs = [("my.py:A", A), ("my.py:Z", Z)]
    found = reward(
        dict(pairs[::-1] if reverse else pairs), {"my.py:A": {"VQ": 1.0}, "my.py:Z": {"VQ": 0.5}}
    )
    assert found.total == 1.0 + 5.0
    expected = {"A/VQ": 1.0, "A/MQ": 2.0, "A/TA": 4.0, "Z/VQ": 10.0, "Z/MQ": 20.0, "Z/TA": 40.0}
    assert found.scores == expected


def test_one_weight_for_a_dimension_of_two_scorers_is_rejected():
    with pytest.raises(ValueError, match="VQ"):
        AsyncScorer({"A": A, "Z": Z}, {"VQ": 1.0})
    with pytest.raises(ValueError, match="B"):
        AsyncScorer({"A": A, "Z": Z}, {"B": {"VQ": 1.0}})
    with pytest.raises(ValueError, match="VQ"):
        AsyncScorer({"A": A}, {"A": {"VQ": 1.0}, "VQ": 2.0})
    with pytest.raises(ValueError, match="Overall"):
        AsyncScorer({"A": A}, {"Overall": 2.0})


def test_only_shared_dimensions_are_renamed():
    other = Fixed(dimensions=("VQ", "size"), VQ=3.0, size=5.0)
    found = reward({"A": A, "B": other}, {"A": {"VQ": 1.0}, "size": 1.0, "MQ": 1.0})
    assert found.total == 1.0 + 5.0 + 2.0
    assert found.scores == {"A/VQ": 1.0, "MQ": 2.0, "TA": 4.0, "B/VQ": 3.0, "size": 5.0}


def test_a_dimension_that_is_not_declared_never_replaces_a_declared_one():
    undeclared = Fixed(dimensions=("size",), VQ=3.0, size=5.0)
    for scorers in ({"A": A, "B": undeclared}, {"B": undeclared, "A": A}):
        found = reward(scorers, {"VQ": 1.0})
        assert found.total == 1.0 and found.scores["B/VQ"] == 3.0


def test_held_out_scorers_of_one_class_name_have_different_names():
    held_out = AsyncScorer({"x/a.py:S": A, "x/b.py:S": Z}, {}, is_held_out=True)
    found = reward({"main": Fixed(VQ=0.0)}, {"VQ": 1.0}, held_out=held_out)
    assert found.scores["held_out/a.py:S/VQ"] == 1.0 and found.scores["held_out/b.py:S/VQ"] == 10.0


def test_weights_by_scorer_declare_the_dimensions_of_a_service():
    class Service(Fixed):
        dimensions = ()  # a service says in its answers what it scores

    service = Service(VQ=10.0, beauty=3.0)
    found = reward(
        {"local": A, "remote": service},
        {"local": {"VQ": 0.5}, "remote": {"VQ": 0.25, "beauty": -1.0}},
    )
    assert found.total == 0.5 * 1.0 + 0.25 * 10.0 - 3.0
    assert found.scores == {
        "local/VQ": 1.0,
        "MQ": 2.0,
        "TA": 4.0,
        "remote/VQ": 10.0,
        "beauty": 3.0,
    }
