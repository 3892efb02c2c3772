"""Analysis of simulated raters with known preferences."""

import csv
import json
from statistics import NormalDist

import numpy as np
import pytest

from hyvideo.ratings.analysis import Judgement, analyze, share
from hyvideo.ratings.study import design
from tests.ratings.conftest import METHODS


def share_of(values, raters, prompts):
    """Return the share of answers with these values."""
    return share(
        [
            Judgement(
                rater=str(rater),
                prompt=str(prompt),
                value=value,
                dimension="Overall",
                answer="",
                first="",
                second="",
                ref_image_path="",
                ref_last_image_path="",
                versus=(0, 1),
            )
            for value, rater, prompt in zip(values, raters, prompts)
        ]
    )


def prefers_lower(_, pair):
    first, second = pair["methods"]
    return "first" if first < second else "second"


def test_intervals_have_95_percent_coverage(random):
    """Latent differences have normal effects of raters, prompts and answers: above 0.2 is a win,
    within 0.2 a tie.
    """
    mean = 0.8
    rater_std = 0.3
    prompt_std = 0.8
    raters, prompts, studies = 12, 16, 150
    designed = design(2, prompts, raters=raters, pairs=12, seed=0)
    rater = np.repeat(np.arange(raters), 12)
    prompt = np.array([unit for screens in designed for unit, *_ in screens])
    total = NormalDist(mean, (1 + rater_std**2 + prompt_std**2) ** 0.5)
    truth = 1 - (total.cdf(0.2) + total.cdf(-0.2)) / 2
    covered = 0
    for _ in range(studies):
        effects = (
            random.normal(0, rater_std, raters)[rater]
            + random.normal(0, prompt_std, prompts)[prompt]
        )
        latent = mean + effects + random.normal(size=len(rater))
        values = np.mean([latent > 0.2, latent > -0.2], axis=0).tolist()
        interval = share_of(values, rater.tolist(), prompt.tolist())
        covered += interval["low"] <= truth <= interval["high"]
    assert 0.9 * studies <= covered <= studies


def test_intervals_stay_within_0_and_1_and_have_a_width_if_all_agree():
    for value in (0.0, 0.5, 1.0):
        mean, low, high = share_of(
            [value] * 40, [i % 8 for i in range(40)], [i // 8 for i in range(40)]
        ).values()
        assert mean == value and 0 <= low <= value <= high <= 1
        assert 0.2 < high - low < 0.9


def test_preferences_are_measured_independently_of_sides(study, answer_all):
    answer_all(prefers_lower)
    analyze(study)
    found = json.loads((study.folder / "analysis.json").read_text())
    versus = [(METHODS[a], METHODS[b]) for a, b in ((0, 1), (0, 2), (1, 2))]
    assert found["raters"] == 4 and len(found["questions"]) == 4
    for rates in found["questions"].values():
        assert [(rate["method"], rate["against"]) for rate in rates] == versus
        assert all(rate["mean"] == 1 and 0.2 < rate["low"] < 1 for rate in rates)
    sides = {row["answer"] for row in study.rows()}
    assert sides == {"first", "second"}  # so that a swap of sides would show


def test_the_table_and_the_pairs_are_written(study, answer_all):
    with pytest.raises(ValueError, match="no answers"):
        analyze(study)
    answer_all(lambda rater, pair: "both_bad" if rater == "r01" else prefers_lower(rater, pair))
    lines = analyze(study).splitlines()
    assert (study.folder / "analysis.md").read_text().splitlines() == lines
    assert lines[0] == "| Question | Method | Against | Answers | Win rate (%) |"
    assert len([line for line in lines if line.startswith("| VQ |")]) == 3
    assert "4 raters, 4 prompts" in lines[-1]
    with open(study.folder / "pairs.csv") as file:
        pairs = list(csv.DictReader(file))
    assert list(pairs[0]) == ["prompt", "first", "second", "dimension", "answer", "rater"]
    assert len(pairs) == 4 * 8 * 4 and all(
        (study.folder / pair["first"]).is_file() for pair in pairs
    )
    assert {pair["answer"] for pair in pairs if pair["rater"] == "r01"} == {"both_bad"}
