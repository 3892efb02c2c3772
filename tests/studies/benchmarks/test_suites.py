"""VBench and VBench-2.0: published numbers, names of files, and totals."""

import json
import math

import pytest

from studies.benchmarks.suites import SUITES, TOTAL
from studies.benchmarks.videos import list_clips, read_list

VBENCH, VBENCH2 = SUITES["vbench"], SUITES["vbench2"]
# Dimensions of VBench by the prompts that they share, with the number of prompts.
SHARED = {
    ("subject_consistency", "motion_smoothness", "dynamic_degree"): 72,
    ("scene", "background_consistency"): 86,
    ("overall_consistency", "aesthetic_quality", "imaging_quality"): 93,
    ("temporal_flickering",): 75,
    ("object_class",): 79,
    ("multiple_objects",): 82,
    ("color",): 85,
    ("spatial_relationship",): 84,
    ("human_action",): 100,
    ("appearance_style",): 90,
    ("temporal_style",): 100,
}


def write_list(path, rows):
    path.write_text(
        json.dumps([{"prompt_en": prompt, "dimension": [*names]} for prompt, names in rows])
    )
    return path


@pytest.fixture
def vbench_list(tmp_path):
    rows = [(f"{names[0]} {n}", names) for names, number in SHARED.items() for n in range(number)]
    for twice in (600, 610):
        rows[twice + 1] = rows[twice]
    return write_list(tmp_path / "VBench_full_info.json", rows)


@pytest.fixture
def vbench2_list(tmp_path):
    rows = [
        (f"{name} {n}", [name])
        for name, each in VBENCH2.dimensions.items()
        for n in range(each.prompts)
    ]
    for n in range(217):  # prompts of another dimension
        rows[-1 - n] = (rows[100 + n][0], rows[-1 - n][1])
    return write_list(tmp_path / "VBench2_full_info.json", rows)


def test_vbench_has_946_prompts_and_6220_videos(vbench_list):
    suite, rows = read_list(vbench_list, [], is_official=True)
    clips = list_clips(suite, rows, {}, seed=0)
    assert (suite, len(rows), len({prompt for prompt, _ in rows}), len(clips)) == (
        VBENCH,
        946,
        944,
        6220,
    )
    assert len(list_clips(suite, rows, {}, seed=0, num_videos=5)) == 4720
    assert all(clip.files == [f"{clip.request.prompt}-{clip.number}.mp4"] for clip in clips)


def test_vbench2_has_1230_prompts_in_folders_and_makes_a_repeated_prompt_once(vbench2_list):
    suite, rows = read_list(vbench2_list, [], is_official=True)
    clips = list_clips(suite, rows, {}, seed=0)
    assert (suite, len(rows), len({prompt for prompt, _ in rows}), len(clips)) == (
        VBENCH2,
        1230,
        1013,
        3209,
    )
    files = [file for clip in clips for file in clip.files]
    assert len(files) == len(set(files)) == 3860
    assert sum(file.startswith("Diversity/") for file in files) == 200
    assert "Human_Anatomy/Human_Anatomy 0-2.mp4" in files


def test_seeds_differ_by_video_and_do_not_depend_on_the_other_dimensions(vbench_list):
    suite, rows = read_list(vbench_list, [], is_official=True)
    seeds = {clip.files[0]: clip.request.seed for clip in list_clips(suite, rows, {}, seed=0)}
    assert len(set(seeds.values())) == 6220
    subset = list_clips(*read_list(vbench_list, ["color"], is_official=True), {}, seed=0)
    assert {clip.files[0]: clip.request.seed for clip in subset}.items() <= seeds.items()
    assert subset[0].request.seed != list_clips(suite, rows, {}, seed=1)[0].request.seed
    assert [clip.number for clip in subset] == [number for number in range(5) for _ in range(85)]


def test_long_prompts_of_vbench2_are_cut_at_180_characters_in_file_names_only():
    (clip, *_) = list_clips(VBENCH2, [("x" * 200, ["Mechanics"])], {}, seed=0)
    assert clip.files == [f"Mechanics/{'x' * 180}-0.mp4"] and clip.request.prompt == "x" * 200
    (clip, *_) = list_clips(VBENCH, [("x" * 210, ["scene"])], {}, seed=0)
    assert clip.files == [f"{'x' * 210}-0.mp4"]


def test_augmented_prompts_are_sampled_under_the_short_names():
    rows, augmented = [("a cat", ["color"])], {"a cat": "a cat in the sun"}
    clip, plain = (list_clips(VBENCH, rows, each, seed=0)[0] for each in (augmented, {}))
    assert (clip.request.prompt, clip.request.original_prompt) == ("a cat in the sun", "a cat")
    assert (clip.files, clip.request.seed) == (plain.files, plain.request.seed)
    with pytest.raises(ValueError, match="a bird"):
        list_clips(VBENCH, [("a bird", ["color"])], augmented, seed=0)


# --- totals, with weights, minima and maxima as published -----------------------------------------

QUALITY = {  # weight, min, max
    "subject_consistency": (1, 0.1462, 1),
    "background_consistency": (1, 0.2615, 1),
    "temporal_flickering": (1, 0.6293, 1),
    "motion_smoothness": (1, 0.706, 0.9975),
    "aesthetic_quality": (1, 0, 1),
    "imaging_quality": (1, 0, 1),
    "dynamic_degree": (0.5, 0, 1),
}
SEMANTIC = {
    name: (1, 0, 1)
    for name in "object_class multiple_objects human_action color spatial_relationship".split()
}
SEMANTIC |= {"scene": (1, 0, 0.8222), "appearance_style": (1, 0.0009, 0.2855)}
SEMANTIC |= {"temporal_style": (1, 0, 0.364), "overall_consistency": (1, 0, 0.364)}


def test_totals_of_vbench_are_the_published_ones():
    scores = {name: 0.3 + 0.02 * n for n, name in enumerate(VBENCH.dimensions)}

    def part(table):
        terms = [w * (scores[name] - low) / (high - low) for name, (w, low, high) in table.items()]
        return sum(terms) / sum(w for w, _, _ in table.values())

    assert {*QUALITY, *SEMANTIC} == {*VBENCH.dimensions}
    assert VBENCH.score("quality", scores) == pytest.approx(part(QUALITY))
    assert VBENCH.score("semantic", scores) == pytest.approx(part(SEMANTIC))
    assert VBENCH.score(TOTAL, scores) == pytest.approx((4 * part(QUALITY) + part(SEMANTIC)) / 5)
    assert VBENCH.score("scene", scores) == scores["scene"]


def test_totals_of_vbench2_are_means_of_categories():
    scores = {name: 0.01 * n for n, name in enumerate(VBENCH2.dimensions)}
    sizes = {
        "creativity": 2,
        "commonsense": 2,
        "controllability": 7,
        "human_fidelity": 3,
        "physics": 4,
    }
    assert {
        name: list(each.category for each in VBENCH2.dimensions.values()).count(name)
        for name in VBENCH2.categories
    } == sizes
    means = [
        math.fsum(scores[n] for n, each in VBENCH2.dimensions.items() if each.category == name)
        / size
        for name, size in sizes.items()
    ]
    assert [VBENCH2.score(name, scores) for name in sizes] == pytest.approx(means)
    assert VBENCH2.score(TOTAL, scores) == pytest.approx(sum(means) / 5)
