"""Answers are kept once, and what cannot be an answer is refused."""

import json

import pytest

from hyvideo.evaluation.preference.answers import Study
from tests.evaluation.preference.conftest import add, content


@pytest.fixture
def rater(study):
    return next(iter(study.raters))


def test_a_rater_goes_on_at_the_first_pair_without_an_answer(study, rater):
    pairs = list(study.raters[rater]["pairs"])
    assert study.state(rater)["total"] == len(pairs) == 12
    add(study, rater, pairs[0], "tie")
    waiting = Study(study.folder).state(rater)["pairs"]
    assert [pair["id"] for pair in waiting] == pairs[1:]
    assert all(pair.keys() == {"id", "prompt"} for pair in waiting)


def test_the_first_answer_to_a_pair_counts(study, rater):
    pair = next(iter(study.raters[rater]["pairs"]))
    for answer in ("first", "second"):
        add(study, rater, pair, answer)
    assert [row["answer"] for row in study.rows()] == ["first"] * 4


def test_what_cannot_be_an_answer_is_refused_and_nothing_is_kept(study, rater):
    pair, good = next(iter(study.raters[rater]["pairs"])), dict.fromkeys(study.questions, "tie")
    of_another = next(iter(list(study.raters.values())[1]["pairs"]))
    wrong = [
        (rater, {of_another: good}),
        ("nobody", {pair: good}),
        (None, {pair: good}),
        (rater, [pair]),
        (rater, None),
    ]
    wrong += [(rater, {pair: given}) for given in (None, [], {}, good | {"VQ": "C"}, good | {"VQ": ["tie"]})]
    wrong += [(rater, {pair: given}) for given in (good | {"more": "tie"}, {"VQ": "tie"}, good | {"VQ": None})]
    wrong += [(rater, {pair: good, of_another: good}), (rater, {pair: good, "x": {}}), (rater, None)]
    bodies = [json.dumps({"token": token, "answers": answers}).encode() for token, answers in wrong]
    for body in [*bodies, b"", b"{", b"[" * 9000, b"\xff\xfe", b"NaN", b"[]", b"null", b'{"token": "\\ud800"}']:
        with pytest.raises(ValueError):
            study.add(body)
    assert study.rows() == []


def test_all_that_a_page_without_a_server_saves_is_read_once(study, rater):
    saved = content(study, rater, "", "tie")
    saved["answers"] = {pair: dict.fromkeys(study.questions, "both_bad") for pair in study.raters[rater]["pairs"]}
    for _ in range(2):
        study.add(json.dumps(saved).encode())
    assert [(row["rater"], row["answer"]) for row in study.rows()] == [("r01", "both_bad")] * 4 * 12
    assert study.state(rater)["pairs"] == []
