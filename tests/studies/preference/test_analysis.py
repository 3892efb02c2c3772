"""Analysis of simulated raters with known preferences."""

import csv
import json
import math
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest

from studies.preference import analysis
from studies.preference.analysis import analyze, question_results, share
from studies.preference.study import design
from tests.studies.preference.conftest import METHODS, content


def results(study, most_failed=0.5):
    analyze(study, most_failed)
    return json.loads((study.folder / "analysis.json").read_text())


def share_of(values, raters, prompts):
    given = zip(values, raters, prompts)
    return share(
        [
            SimpleNamespace(value=value, rater=rater, prompt=prompt)
            for value, rater, prompt in given
        ],
        "value",
    )


def prefers_lower(_, pair):
    first, second = pair["methods"]
    return "tie" if first == second else "first" if first < second else "second"


def test_intervals_have_95_percent_coverage(random):
    """Latent differences have normal effects of raters, prompts and answers: above 0.2 is a win,
    within 0.2 a tie.
    """
    mean = 0.8
    rater_std = 0.3
    prompt_std = 0.8
    raters, prompts, studies = 12, 16, 150
    designed = design(2, prompts, raters=raters, pairs=12, checks=0, seed=0)
    rater = np.repeat(np.arange(raters), 12)
    prompt = np.array([unit for screens in designed for _, unit, *_ in screens])
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
    found = results(study)
    versus = [(METHODS[a], METHODS[b]) for a, b in ((0, 1), (0, 2), (1, 2))]
    for result in found["questions"].values():
        assert [(rate["method"], rate["against"]) for rate in result["win_rates"]] == versus
        assert all(rate["mean"] == 1 and 0.2 < rate["low"] < 1 for rate in result["win_rates"])
        first, second, third = result["strengths"].values()
        assert first > 1 > second > -1 > third and result["alpha"] is None
        assert 0.3 < result["first_side"]["mean"] < 0.7
    assert found["questions"]["VQ"]["reward_model"]["mean"] == 1
    assert found["questions"]["Overall"]["reward_model"]["mean"] is None
    assert (
        found["checks"] == {f"r0{number}": [False] * 4 for number in range(1, 5)}
        and found["left_out"] == []
    )


def test_a_rater_who_always_chooses_one_side_is_named_and_can_be_excluded(study, answer_all):
    """Also one who passes enough checks."""
    answer_all(lambda rater, pair: "second" if rater == "r03" else prefers_lower(rater, pair))
    text = analyze(study, 1.0)
    found = json.loads((study.folder / "analysis.json").read_text())
    assert found["one_sided"] == {"r03": "B"} and found["left_out"] == []
    assert "`--exclude r03`" in text
    text = analyze(study, 1.0, ["r03"])
    assert json.loads((study.folder / "analysis.json").read_text())["left_out"] == ["r03"]
    assert "`--exclude r03`" not in text
    assert ",r03" not in (study.folder / "pairs.csv").read_text()
    with pytest.raises(ValueError, match="--exclude .*r9"):
        analyze(study, 1.0, ["r9"])


def test_a_repeat_is_compared_with_the_answer_of_the_same_rater_to_the_same_question_of_the_same_pair(
    study,
):
    """Each question is answered differently; raters, prompts and pairs of methods differ too.

    No repeat fails.
    """
    key = json.loads((study.folder / "key.json").read_text())["pairs"]
    failed = []

    def preferred(rater, question, pair):
        low_first = pair["methods"] == sorted(pair["methods"])
        likes_low = sum(map(ord, f"{rater}{question}{pair['unit']}{sorted(pair['methods'])}")) % 2
        return "first" if low_first == likes_low else "second"

    for token, rater in study.raters.items():
        for pair in rater["pairs"]:
            given = content(study, token, pair, "tie")
            if key[pair]["kind"] != "identical":
                given["answers"][pair] = {
                    q: preferred(rater["name"], q, key[pair]) for q in study.questions
                }
            study.add(json.dumps(given).encode())
    judged = analysis.judgements(study, key)
    assert sum(j.kind == "repeat" for j in judged) >= len(study.raters)
    assert len({j.value for j in judged if j.kind == "repeat"}) > 1
    failed = [j for j in judged if j.is_failed]
    assert not failed


def judged(rows):
    names = ("unit", "versus", "value", "rater", "prompt", "is_first", "is_scored_higher")
    return [
        SimpleNamespace(**dict(zip(names, (unit, (0, 1), value, k, unit, None, None))))
        for k, unit, value in rows
    ]


def test_alpha_and_strengths_match_their_formulas(random):
    """Krippendorff's coincidences c_ab with ordinal distances, and log odds with half a win added
    for each method.
    """
    rows = [(k, unit, random.choice([0.0, 0.5, 1.0])) for unit in range(9) for k in range(unit % 4)]
    found = question_results(judged(rows), ["a", "b"])
    coincidences = np.zeros((3, 3))
    for unit in range(9):
        counts = np.bincount([int(2 * value) for _, u, value in rows if u == unit], minlength=3)
        if counts.sum() > 1:
            coincidences += (np.outer(counts, counts) - np.diag(counts)) / (counts.sum() - 1)
    totals = coincidences.sum(1)
    rank = totals.cumsum() - totals / 2
    distance, total = np.square(rank[:, None] - rank), totals.sum()
    chance = (np.outer(totals, totals) * distance).sum() / (total - 1)
    assert found["alpha"] == pytest.approx(1 - (coincidences * distance).sum() / chance)
    wins = sum(value for *_, value in rows)
    odds = math.log((wins + 0.5) / (len(rows) - wins + 0.5))
    assert list(found["strengths"].values()) == pytest.approx([odds / 2, -odds / 2])


def test_the_table_and_the_pairs_are_written(study, answer_all):
    answer_all(lambda rater, pair: "both_bad" if rater == "r01" else prefers_lower(rater, pair))
    assert "| r01 | 0 | 4 |" in analyze(study, 0.5)
    markdown, latex = ((study.folder / f"table3.{kind}").read_text() for kind in ("md", "tex"))
    lines = markdown.strip().splitlines()
    assert lines[0] == "| Method | Against | Raters | VQ (%) | MQ (%) | TA (%) | Overall (%) |"
    assert (
        len(lines) == 7
        and all(line.count("|") == 8 for line in lines[:5])
        and "on 4 prompts" in lines[6]
    )
    assert latex.count(r" \\") == 4 and r"ours\_zq7 & flow\_zq8 & 4 & " in latex
    with open(study.folder / "table3.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 and 0 < float(rows[0]["VQ low"]) < float(rows[0]["VQ"]) < 1
    with open(study.folder / "pairs.csv") as file:
        pairs = list(csv.DictReader(file))
    assert list(pairs[0]) == ["prompt", "first", "second", "dimension", "answer", "rater"]
    assert len(pairs) == 4 * 8 * 4 and all(
        (study.folder / pair["first"]).is_file() for pair in pairs
    )
    assert {pair["answer"] for pair in pairs if pair["rater"] == "r01"} == {"both_bad"}
