"""Result files of the official tools are read back; scores, totals, differences and intervals."""

import json
import math

import numpy as np
import pytest

from hyvideo.validation.intervals import t_interval, t_quantile
from scripts import benchmark_videos
from studies.benchmarks import table as tables
from studies.benchmarks.results import read_results, read_run
from studies.benchmarks.suites import SUITES

VBENCH = SUITES["vbench"]


def result_file(path, folder="videos", scale=1.0, **dimensions):
    """Write a result file; each dimension has scores by prompt, and its official score is their
    mean.
    """
    content = {}
    for name, prompts in dimensions.items():
        rows = [
            {"video_path": f"/data/{folder}/{prompt}-{number}.mp4", "video_results": x}
            for prompt, scores in prompts.items()
            for number, x in enumerate(scores)
        ]
        counting = [row["video_results"] for row in rows if row["video_results"] != -1]
        content[name.replace("Multi_", "Multi-")] = [float(np.mean(counting)) / scale, rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def row(table, name):
    return next(row for row in table["rows"] if row["name"] == name)


def table_of(*words):
    ((suite, policies),) = read_results([str(word) for word in words])
    return tables.make_table(suite, policies)


def test_scores_and_paired_differences_of_vbench_are_those_computed_by_hand(tmp_path):
    result_file(
        tmp_path / "a/results_1_eval_results.json", scene={"x": [0.2, 0.4], "y": [0.6, 0.8]}
    )
    result_file(
        tmp_path / "b/deep/results_2_eval_results.json", scene={"x": [0.3, 0.5], "y": [0.9, 1.1]}
    )
    table = table_of(f"base={tmp_path / 'a'}", f"tuned={tmp_path / 'b'}")
    assert (table["title"], table["policies"]) == ("VBench", {"base": 1, "tuned": 1})
    scene = row(table, "scene")
    # The half width is 12.706204736 * 40 / 2 (one degree of freedom, prompts with means 30 and 70),
    # above all scores.
    base = {"mean": 50.0, "low": 0.0, "high": 100.0, "videos": 4}
    assert scene["scores"]["base"] == pytest.approx(base)
    difference = scene["differences"]["tuned"]  # +10 for x, +30 for y
    assert (difference["mean"], difference["prompts"]) == (pytest.approx(20), 2)
    assert (difference["low"], difference["high"]) == (-100.0, 100.0)  # half width 127
    assert difference["verdict"] == "no significant difference"
    assert "base" not in scene["differences"]


def test_a_missing_dimension_is_missing_and_no_total_counts_it_as_0(tmp_path):
    everything = {name: {"x": [0.5], "y": [0.6]} for name in VBENCH.dimensions} | {
        "imaging_quality": {"x": [50, 60]}
    }
    lacking = {name: value for name, value in everything.items() if name != "color"}
    full, less = (tmp_path / f"{name}_eval_results.json" for name in "ab")
    result_file(full, **everything)
    result_file(less, **lacking)
    table = table_of(f"base={full}", f"tuned={less}")
    for name in ("color", "semantic", "total"):
        assert row(table, name)["scores"]["base"]["mean"] is not None
        assert (
            row(table, name)["scores"]["tuned"] is None
            and row(table, name)["differences"]["tuned"] is None
        )
    assert row(table, "quality")["differences"]["tuned"]["mean"] == 0
    assert (
        "tuned has no result for color; sums that need them are missing, not 0." in table["notes"]
    )
    turned = table_of(f"tuned={less}", f"base={full}")
    assert (
        row(turned, "total")["differences"]["base"] is None
        and row(turned, "scene")["differences"]["base"]
    )
    assert "| **total** | - |" in tables.as_markdown(turned)


def test_dropped_videos_of_vbench2_do_not_count_and_are_reported(tmp_path):
    first = result_file(
        tmp_path / "a_eval_results.json", Mechanics={"x": [1, 0, -1], "y": [1, 1, 1], "z": [-1, 1]}
    )
    second = result_file(
        tmp_path / "b_eval_results.json", Mechanics={"x": [-1, 1, 1], "y": [1, 1, 0], "z": [1, -1]}
    )
    table = table_of(f"base={first}", f"tuned={second}")
    scores = row(table, "Mechanics")["scores"]
    assert [scores[name]["mean"] for name in ("base", "tuned")] == pytest.approx([100 * 5 / 6] * 2)
    assert [scores[name]["videos"] for name in ("base", "tuned")] == [6, 6]
    difference = row(table, "Mechanics")["differences"]["tuned"]  # x: video 1 only; y: all; z: none
    assert (difference["mean"], difference["prompts"]) == (pytest.approx(100 * (1 - 1 / 3) / 2), 2)
    assert (
        "base: the benchmark did not count 2 of 8 videos of Mechanics; a difference needs both "
        "videos." in table["notes"]
    )
    _, run = read_run(
        result_file(tmp_path / "c_eval_results.json", overall_consistency={"x": [-1.0, 0.5]})
    )
    assert len(run["overall_consistency"].videos) == 2  # a cosine


# --- intervals ------------------------------------------------------------------------------------


def test_the_interval_of_a_sum_adds_the_variances_of_dimensions_with_different_prompts():
    drawn, sizes, factors = np.random.default_rng(0), {"a": 4, "b": 50}, {"a": 0.3, "b": 0.7}
    scores = {
        name: dict(zip((f"{name}{n}" for n in range(size)), drawn.normal(size=size)))
        for name, size in sizes.items()
    }
    found = t_interval(tables.prompt_values([scores], factors))
    arrays = {name: np.array([*scores[name].values()]) for name in sizes}
    assert found.mean == pytest.approx(sum(factors[name] * arrays[name].mean() for name in sizes))
    variance = sum(
        factors[name] ** 2 * arrays[name].var(ddof=1) / size for name, size in sizes.items()
    )
    assert found.high - found.mean == pytest.approx(t_quantile(53) * math.sqrt(variance))


def test_several_runs_widen_the_interval_and_share_the_run_of_the_base(tmp_path):
    base = result_file(tmp_path / "base_eval_results.json", scene={p: [0.5] for p in "abcd"})
    words = [f"base={base}"]
    for number, gain in enumerate((0.1, 0.2, 0.3)):
        path = tmp_path / f"{number}_eval_results.json"
        words.append(f"tuned={result_file(path, scene={p: [0.5 + gain] for p in 'abcd'})}")
    table = table_of(*words)
    difference = row(table, "scene")["differences"]["tuned"]
    assert difference["mean"] == pytest.approx(20)
    assert difference["high"] - 20 == pytest.approx(t_quantile(2) * 10 / math.sqrt(3))
    assert [note for note in table["notes"] if "has one run" in note] == [
        "base has one run: its intervals do not cover the variation between training runs."
    ]
    assert row(table_of(*words[:2]), "scene")["differences"]["tuned"]["verdict"] == "higher"
    with pytest.raises(
        ValueError, match="base must have one run, or as many as every other policy"
    ):
        table_of(words[0], *words)


def test_read_writes_a_table_of_both_benchmarks(tmp_path, capsys):
    one = result_file(tmp_path / "1_eval_results.json", scene={"x": [0.5], "y": [0.6]})
    two = result_file(tmp_path / "2_eval_results.json", scene={"x": [0.7], "y": [0.8]})
    other = result_file(tmp_path / "3_eval_results.json", Mechanics={"x": [1], "y": [0]})
    out = tmp_path / "out"
    words = [f"base={one}", f"base={other}", f"tuned={two}"]
    benchmark_videos.main(["read", "--output_dir", str(out), "--results", *words])
    text = (out / "table.md").read_text()
    assert text in capsys.readouterr().out
    assert (
        "| VBench (%) | base | tuned | tuned - base |\n| --- | --- | --- | --- |\n| **total** | - "
        "| - | - |" in text
    )
    assert (
        "| scene | 55.00 [0.00, 100.00] | 75.00 [11.47, 100.00] | +20.00 [+20.00, +20.00] higher |"
        in text
    )
    assert "| Mechanics | 50.00 [0.00, 100.00] |" in text
    content = json.loads((out / "benchmarks.json").read_text())["benchmarks"]
    assert [table["title"] for table in content] == ["VBench", "VBench-2.0"]
    assert content[0] == table_of(words[0], words[2])
