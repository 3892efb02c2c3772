"""Designs are balanced and checks are where they should be; files do not tell the method."""

import json
from collections import Counter

import pytest

from hyvideo.data.videos import read_video
from hyvideo.evaluation.preference.study import Plan, design, make_study
from tests.evaluation.preference.conftest import METHODS, write_folder

SIZES = [(2, 12, 10, 12), (3, 12, 29, 20), (4, 32, 29, 20), (3, 7, 5, 21), (2, 5, 1, 3)]


def spread(counts):
    return max(counts) - min(counts)


@pytest.mark.parametrize("methods, units, raters, pairs", SIZES)
def test_a_design_is_balanced_over_methods_prompts_and_sides(methods, units, raters, pairs):
    plan = Plan(raters, pairs, repeats=0, identical=0, study_seed=4)
    screens = design(plan, methods, units)
    together = [screen for of_rater in screens for screen in of_rater]
    versus = Counter(tuple(sorted(s[2:])) for s in together)
    assert len(versus) == min(methods * (methods - 1) // 2, len(together)) and spread(versus.values()) <= 1
    assert spread([Counter(s.unit for s in together)[unit] for unit in range(units)]) <= 2
    cells = Counter((s.unit, *sorted(s[2:])) for s in together)
    assert spread(cells.values()) <= 1
    for of_rater in screens:
        assert len(set((s.unit, *sorted(s[2:])) for s in of_rater)) == pairs
        assert spread(Counter(tuple(sorted(s[2:])) for s in of_rater).values()) <= 1
        for low, high in versus:
            sides = Counter(s.first for s in of_rater if sorted(s[2:]) == [low, high])
            assert abs(sides[low] - sides[high]) <= 1


def test_sides_and_order_differ_between_raters_and_are_those_of_the_seed():
    plan = Plan(raters=6, pairs=12, repeats=0, identical=0, study_seed=1)
    screens = design(plan, 2, 12)
    assert screens == design(plan, 2, 12)
    assert len({tuple(s.unit for s in of_rater) for of_rater in screens}) == 6
    sides = [[s.first for s in of_rater] for of_rater in screens]
    assert len(set(map(tuple, sides))) == 6
    assert sum(a != b for row in sides for a, b in zip(row, row[1:])) < 0.8 * 66, "sides must not alternate"


def test_checks_come_after_the_pairs_that_they_repeat_and_exchange_their_sides():
    for screens in design(Plan(raters=20, pairs=10, repeats=3, identical=2), 3, 12):
        kinds = Counter(s.kind for s in screens)
        assert kinds == {"pair": 10, "repeat": 3, "identical": 2}
        for place, (kind, unit, first, second) in enumerate(screens):
            if kind == "repeat":
                assert screens.index(("pair", unit, second, first)) < place - 1
            assert (first == second) == (kind == "identical")


@pytest.mark.parametrize("wrong", [{"raters": 0}, {"pairs": 13}, {"pairs": 0}, {"repeats": 7}, {"identical": -1}])
def test_a_plan_that_cannot_be_filled_is_refused(wrong):
    with pytest.raises(ValueError, match=f"--{next(iter(wrong))} must be from"):
        design(Plan(**({"pairs": 12} | wrong)), 2, 12)


def test_files_of_a_study_do_not_tell_the_method_and_the_key_does(study, folders):
    files = sorted((study.folder / "videos").iterdir())
    key = json.loads((study.folder / "key.json").read_text())
    assert len({file.stat().st_mtime for file in files}) == 1
    assert len(files) == 12
    for file in [*files, study.folder / "study.json"]:
        content = file.read_bytes()
        assert not [name for name in METHODS if name.encode() in content or name in file.name]
    assert key["methods"] == list(METHODS)
    for pair in key["pairs"].values():
        for side, source in zip(("first", "second"), pair["sources"]):
            copied, original = (read_video(path)[0] for path in (study.folder / "videos" / pair[side], source))
            assert (copied.int() - original.int()).abs().max() <= 2


def test_another_study_of_the_same_seed_has_other_names_and_tokens(study, folders, tmp_path):
    make_study(tmp_path / "other", folders, [], Plan(raters=4, pairs=8))
    other = json.loads((tmp_path / "other/study.json").read_text())
    assert not set(other["raters"]) & set(study.raters)
    assert not {p.name for p in (tmp_path / "other/videos").iterdir()} & {p.name for p in study.folder.glob("videos/*")}


def test_folders_are_compared_on_the_prompts_that_all_have(folders, tmp_path):
    fewer = write_folder(tmp_path / "fewer", ["a star", "a dog", "a red circle"], name="x{}")
    make_study(tmp_path / "study", {"ours": folders[METHODS[0]], "fewer": fewer}, [], Plan(1, 2, 0, 0))
    pairs = json.loads((tmp_path / "study/key.json").read_text())["pairs"].values()
    assert {pair["prompt"] for pair in pairs} == {"a star", "a red circle"}
    strange = write_folder(tmp_path / "strange", ["a dog"])
    for given in ({"ours": folders[METHODS[0]], "strange": strange}, {"ours": fewer}):
        with pytest.raises(ValueError, match="two methods or more"):
            make_study(tmp_path / "none", given, [], Plan(1, 2, 0, 0))
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="without a study"):
        make_study(tmp_path / "study", {"ours": fewer, "again": fewer}, [], Plan(1, 2, 0, 0))
