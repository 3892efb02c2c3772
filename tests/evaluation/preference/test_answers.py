"""Answers are kept once, and what cannot be an answer is refused."""

import json

import pytest

from hyvideo.evaluation.preference.answers import Study


@pytest.fixture
def rater(study):
    return next(iter(study.raters))


def test_a_rater_goes_on_at_the_first_pair_without_an_answer(study, rater):
    first, second = list(study.raters[rater]["pairs"])[:2]
    assert study.state(rater)["pair"]["id"] == first and study.state(rater)["total"] == 12
    study.add(rater, first, dict.fromkeys(study.questions, "tie"))
    state = Study(study.folder).state(rater)
    assert state["pair"]["id"] == second and state["done"] == 1
    assert state["pair"].keys() == {"id", "prompt"}


def test_the_first_answer_to_a_pair_counts(study, rater):
    pair = next(iter(study.raters[rater]["pairs"]))
    for answer in ("first", "second"):
        study.add(rater, pair, dict.fromkeys(study.questions, answer))
    assert [row["answer"] for row in study.rows()] == ["first"] * 4


def test_what_cannot_be_an_answer_is_refused_and_nothing_is_kept(study, rater):
    pair, good = next(iter(study.raters[rater]["pairs"])), dict.fromkeys(study.questions, "tie")
    of_another = next(iter(list(study.raters.values())[1]["pairs"]))
    wrong = [(rater, of_another, good), ("nobody", pair, good), (rater, None, good), (rater, [pair], good)]
    wrong += [(rater, pair, given) for given in (None, [], {}, good | {"VQ": "C"}, good | {"VQ": ["tie"]})]
    wrong += [(rater, pair, given) for given in (good | {"more": "tie"}, {"VQ": "tie"}, good | {"VQ": None})]
    for given in wrong:
        with pytest.raises(ValueError):
            study.add(*given)
    assert study.rows() == []


def test_a_file_of_a_page_without_a_server_is_read(study, rater, tmp_path):
    pair, good = next(iter(study.raters[rater]["pairs"])), dict.fromkeys(study.questions, "both_bad")
    path = tmp_path / "answers.json"
    path.write_text(json.dumps({"token": rater, "answers": [{"pair": pair, "answers": good, "at": 5.0}]}))
    study.add_file(path)
    study.add_file(path)
    assert [tuple(row) for row in study.rows()] == [("r01", pair, name, "both_bad", 5.0) for name in study.questions]
    for wrong in ([], {}, {"token": rater, "answers": [5]}, {"token": rater, "answers": [{"pair": pair}]}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="answers.json"):
            study.add_file(path)


def test_a_folder_without_a_study_is_refused(tmp_path):
    with pytest.raises(ValueError, match="study.json"):
        Study(tmp_path)
