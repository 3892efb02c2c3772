"""Recipes at equal cost: their file, their budgets, the cost and metrics of runs, and the output
files.
"""

import csv
import itertools
import json
import math
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import yaml

from hyvideo.data.prompts import read_requests
from hyvideo.records.metrics_file import read_metrics
from hyvideo.settings.command_line import load_config
from hyvideo.validation.scores_file import write_csv
from hyvideo.validation.validation import conditions_of
from scripts import compare_recipes
from scripts.audit.__main__ import audit_of
from studies.recipes.confounders import confounder, describe_differences, differing_settings
from studies.recipes.recipe_results import (
    COMPARED,
    at_cost,
    axis_of,
    check_validations,
    curve,
    guided_base,
    read_trace,
    seed_rows,
    write_verdicts,
)
from studies.recipes.recipes import AXES, Budget, limit_to_budget, read_recipes
from studies.recipes.runs import Recipe, RecipeRun, RecipeStudy, progress
from studies.tables.seed_table import read_seed_table

FILE = """
base: configs/smoke.yaml
common: {grpo_sampling_steps: 2, cfg_scale: 1, validation_interval: 2, validation_steps: 2,
         log_num_videos: 0, report: false, validation_repeats: 2, validate_at_step0: true,
         pretrained_model_root: tests/shallow_miniature}
recipes:
  one update: {num_updates_per_rollout: 1}
  two.updates: {config: %s, learning_rate: 1e-2}
""".replace("one update", "one_update").replace("%s", "configs/smoke.yaml")


@pytest.fixture
def file(tmp_path, tiny_config):
    def write(text=FILE):
        (tmp_path / "recipes.yaml").write_text(text)
        return str(tmp_path / "recipes.yaml")

    return write


@pytest.fixture
def compare(exit_code, tmp_path, file, forked_programs, capfd):
    def run(*flags, text=FILE):
        words = [file(text), "--seeds", 2, "--jobs", 2, "--output_dir", tmp_path / "out", *flags]
        code = exit_code(compare_recipes.main, *words)
        return code, capfd.readouterr()

    return run


@pytest.mark.slow
def test_recipes_are_trained_to_the_budget_and_compared_once(compare, tmp_path):
    with_control = FILE.replace("1e-2}", "1e-2, control: true, validation_steps: 2}")
    with_control = with_control.replace("validation_steps: 2, ch", "ch").replace(
        "r_rollout: 1", "r_rollout: 1, validation_steps: 2"
    )
    code, output = compare("--budget", "rollouts=17", "--guided_base", 2, text=with_control)
    out = tmp_path / "out"
    assert code == 0 and output.out.count(": trained") == 6, output
    rows = {row["Recipe"]: row for row in csv.DictReader((out / "recipes.csv").open())}
    assert not audit_of(out).differs  # of the table, and of the six runs
    table = read_seed_table(out / "seeds.csv")
    for (name,), values in table.values.items():
        assert len(values["reward"]) == 2
        interval = table.intervals((name,))["reward"]
        assert f"{interval.mean:.4f}" == f"{float(rows[name]['Reward']):.4f}"
        assert f"{interval.low:.3f}" == f"{float(rows[name]['Reward low']):.3f}"
    bases = ["Base model", "Base model, guidance 2"]
    assert list(rows) == [*bases, "one_update", "two.updates", "two.updates_control"]
    # two steps
    assert [row["Forwards a video"] for row in rows.values()] == ["2", "4", "2", "2", "2"]
    assert (
        rows[bases[0]]["Reward"] != rows[bases[1]]["Reward"]
        and (out / "scores/base-guided-2.json").is_file()
    )
    scores = json.loads((out / "scores/base-guided-2.json").read_text())
    assert float(rows[bases[1]]["Reward"]) == pytest.approx(
        scores["summary"]["reward"]["mean"], 1e-4
    )
    study = RecipeStudy("configs/smoke.yaml", out, read_recipes(str(tmp_path / "recipes.yaml"))[1])
    run = RecipeRun(Recipe("one_update", ("--validation_steps=2",)), 0)
    unguided, trace = guided_base(study, run, 1.0), read_trace(study, run)
    measured = {
        name: values[0]
        for name, values in trace.items()
        if math.isfinite(values[0]) and name not in AXES
    }
    assert {*COMPARED.values()} - {"True reward"} <= measured.keys()
    assert {name: unguided[name][0] for name in measured} == pytest.approx(measured, rel=1e-5)
    # of the recipes, not of the base config
    assert scores["of"]["settings"]["validation_steps"] == 2
    assert (
        "ignore_rewards: true" in (out / "cells/two.updates_control-seed1/config.yaml").read_text()
    )
    line = read_metrics(out / "cells/two.updates-seed1/metrics.jsonl")
    other = json.loads((out / "cells/two.updates-seed0/metrics.jsonl").read_text().splitlines()[-1])
    # two iterations of 8 rollouts are within the budget
    assert [x["iteration"] for x in line] == [1, 2]
    row = rows["two.updates"]
    forwards = 8 * sum(x["cost/forwards"] for x in line)
    assert (row["Rollouts"], row["Forwards"], row["Seeds"]) == ("16", f"{forwards:.0f}", "2")
    assert float(row["Reward"]) == pytest.approx(
        (line[1]["validation/reward"] + other["validation/reward"]) / 2, 1e-4
    )
    assert (
        float(rows["Base model"]["Reward"]) != float(row["Reward"])
        and rows["Base model"]["Rollouts"] == "0"
    )
    assert (
        out / "recipes.md"
    ).read_text() in output.out and "| two.updates against one_update | 2 |" in output.out
    verdicts = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[1:]
        for line in (out / "verdicts.md").read_text().splitlines()
    }
    for other in ("one_update", "two.updates_control"):
        seeds, forwards, seconds, reward, *_ = verdicts[f"two.updates against {other}"]
        gain = float(row["Reward"]) - float(rows[other]["Reward"])
        assert seeds == "2" and reward.startswith(f"{gain:+.3f} [")
        assert forwards == f"{float(row['Forwards']):,.0f}, {float(rows[other]['Forwards']):,.0f}"
        assert seconds == f"{row['CPU seconds']}, {rows[other]['CPU seconds']}"
    assert all(each["time/cpu"] > 0 for each in line)
    assert "two.updates_control against" not in (out / "verdicts.md").read_text()
    for name in ("curves_rollouts", "curves_forwards", "curves_seconds", "pareto"):
        assert (out / f"{name}.png").stat().st_size > 10_000

    code, output = compare("--budget", "rollouts=17", "--dry_run", text=with_control)
    assert code == 0 and "6 cells, 0 to run" in output.out
    code, output = compare("--budget", "rollouts=17", text=FILE.replace("1e-2", "2e-2"))
    assert code == 2 and "learning_rate 0.01" in output.err
    code, output = compare("--budget", "rollouts=8")
    assert code == 2 and "max_steps" in output.err


def test_a_dry_run_writes_nothing_and_a_table_needs_a_finished_run(compare, tmp_path):
    code, output = compare("--budget", "forwards=1000", "--dry_run")
    assert code == 0 and "4 cells, 4 to run" in output.out and not (tmp_path / "out").exists()
    code, output = compare("--budget", "forwards=1000", "--only_table")
    assert code == 2 and str(tmp_path) in output.err


@pytest.mark.parametrize(
    "text, message",
    [
        (FILE.replace("learning_rate: 1e-2", "seed: 3"), "cannot set seed"),
        (
            FILE.replace("learning_rate: 1e-2", "reward_weights: averaged"),
            r"two.updates must have the same reward_weights \(averaged, not alignment\)",
        ),
    ],
)
def test_invalid_and_incomparable_recipes_are_errors(compare, text, message):
    code, output = compare("--budget", "rollouts=17", "--dry_run", text=text)
    assert code == 2 and (message in output.err or re.search(message, output.err))


def test_settings_of_a_file_become_flags(file):
    settings = (
        'recipes: {a: {reward_model: [one, two], report: false, reward_weights: {"VQ": 1}, eta: '
        '1e-7, resume: ""}}'
    )
    _, common, (recipe,) = read_recipes(file(f"base: x.yaml\n{settings}"))
    assert common == [] and recipe.flags([]) == [
        *(
            "--reward_model",
            "one",
            "two",
            "--report=false",
            '--reward_weights={"VQ": 1}',
            "--eta=1e-07",
            "--resume=",
        )
    ]


def test_a_budget_of_forwards_gives_the_cheaper_recipe_more_iterations(tmp_path, tiny_config):
    study = RecipeStudy("configs/miniature_paper.yaml", tmp_path)
    recipes = [Recipe("full", ()), Recipe("window", ("--sde_window", "sliding:2"))]
    full, window = (
        study.config(RecipeRun(recipe, 0)).optimizer.max_steps
        for recipe in limit_to_budget(Budget("forwards", 40_000), study, recipes)
    )
    # 8 steps, 7 trained at 3 each and 7 of the anchor; the window has 2 trained steps, and the
    # anchor only there.
    assert full == 40_000 // (32 * 36) and window == 40_000 // (32 * (8 + 2 + 3 * 2))
    (timed,) = limit_to_budget(Budget("seconds", 9), study, recipes[:1])
    assert study.config(RecipeRun(timed, 0)).optimizer.max_steps == 60  # of the config


def test_a_recipe_with_a_config_shares_the_common_settings(file, tmp_path, tiny_config):
    text = "base: configs/miniature.yaml\ncommon: {validation_interval: 5, save_interval: 5}\n"
    text += (
        "recipes: {sage: {}, guidance: {config: configs/miniature_guidance.yaml, kl_weight: 0.5}}"
    )
    base, common, recipes = read_recipes(file(text))
    study = RecipeStudy(base, tmp_path / "out", common)
    sage, guidance = (
        study.config(RecipeRun(recipe, 0))
        for recipe in limit_to_budget(Budget("rollouts", 640), study, recipes)
    )
    assert (sage.objective.name, guidance.objective.name) == (
        "grpo",
        "nft",
    ) and sage.data == guidance.data
    trust = guidance.objective
    # file, flag, file
    assert (trust.anchor_cfg_scale, trust.kl_weight, guidance.rollout.eta) == (3, 0.5, 0)
    assert sage.validation.validation_interval == guidance.validation.validation_interval == 5
    assert (sage.optimizer.max_steps, guidance.optimizer.max_steps) == (640 // 32, 640 // 8)


def test_two_lines_compare_two_configs_in_the_validation_of_the_first(file, tmp_path, tiny_config):
    """The student is validated with 2 steps by its config, at another interval."""
    text = "nft: configs/miniature_nft.yaml\nstudent: configs/miniature_student.yaml\n"
    base, common, recipes = read_recipes(file(text))
    study = RecipeStudy(base, tmp_path / "out", common)
    nft, student = (
        study.config(RecipeRun(recipe, 0))
        for recipe in limit_to_budget(Budget("forwards", 9_000), study, recipes)
    )
    assert (nft.objective.name, student.objective.name) == ("nft", "distill")
    assert student.rollout.grpo_sampling_steps == 2
    assert nft.validation_sampling == student.validation_sampling


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: 3", "NAME: CONFIG.yaml"),
        ("a: configs/smoke.yaml\nb: configs/nope.yaml", "recipe b: .*configs/nope.yaml"),
        (
            "recipes: {b: {config: configs/smoke.yaml, validation_steps: 3}}\n",
            "base: FILE.yaml",
        ),
    ],
)
def test_a_file_without_configs_is_an_error(file, text, message):
    with pytest.raises(ValueError, match=message):
        read_recipes(file(text))


def test_a_recipe_with_a_validation_of_its_own_is_not_compared(file, tmp_path, tiny_config):
    text = "base: configs/miniature.yaml\nrecipes: {a: {}, b: {validation_steps: 3}}\n"
    base, common, recipes = read_recipes(file(text))
    study = RecipeStudy(base, tmp_path / "out", common)
    with pytest.raises(ValueError, match=r"b must have the same validation_steps \(3, not 8\)"):
        limit_to_budget(Budget("rollouts", 64), study, recipes)


def test_a_run_with_a_custom_objective_is_known_again(tmp_path, tiny_config):
    code = "from hyvideo.training.objectives.nft import NFT\n\nclass Own(NFT):\n    pass\n"
    (tmp_path / "own.py").write_text(code)
    study = RecipeStudy("configs/miniature_nft.yaml", tmp_path)
    run = RecipeRun(Recipe("own", ("--objective", f"{tmp_path / 'own.py'}:Own")), 0)
    config, folder = study.config(run), study.folder(run)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.flat()))
    (folder / "metrics.jsonl").write_text(json.dumps({"iteration": 1}) + "\n")
    assert not progress(folder, config).is_finished
    with pytest.raises(ValueError, match="learning_rate 0.0004 instead of 0.1"):
        progress(folder, config.with_settings(learning_rate=0.1))


def configs_of(**files):
    return {name: load_config(f"configs/{file}.yaml") for name, file in files.items()}


def test_the_settings_in_which_recipes_differ_are_named():
    sage, nft = configs_of(sage="miniature", nft="miniature_nft").values()
    differing = differing_settings(sage, nft)
    assert differing["objective"] == ("grpo", "nft") and differing["eta"] == (0.7, 0)
    assert differing["nft_levels"] == (None, 4)
    assert not {"seed", "output_dir", "shift", "validation_interval"} & differing.keys()
    assert not differing_settings(sage, sage.with_settings(output_dir="x", max_steps=7))
    words = describe_differences(differing_settings(sage, sage.with_settings(eta=0.5)))
    assert words == "eta 0.7 and 0.5"


def scores_of(**rewards):
    """Return the scores of recipes with two seeds, whose rewards differ from the mean by 0.001."""
    return {
        name: {seed: {"Reward": np.array([mean + 0.001 * seed])} for seed in (0, 1)}
        for name, mean in rewards.items()
    }


@pytest.mark.parametrize("has_control", [False, True])
def test_a_guided_anchor_without_a_control_is_no_better_method(tmp_path, tiny_config, has_control):
    """As in a comparison of miniature_draft and miniature, whose anchor has no guidance."""
    scores = scores_of(sage=1.6, nft=1.7, draft=1.8)
    controls = {}
    if has_control:
        scores |= scores_of(draft_control=1.74)
        controls = {"draft": "draft_control"}
    configs = configs_of(sage="miniature", nft="miniature_nft", draft="miniature_draft")
    configs["draft_control"] = configs["draft"].with_settings(ignore_rewards=True)
    costs = {name: {"Forwards": "9,600", "CPU seconds": "122"} for name in scores}
    costs["draft"] = {"Forwards": "9,984", "CPU seconds": "230"}
    path = tmp_path / "verdicts.md"
    write_verdicts(scores, controls, configs, costs, path, baseline="sage")
    lines = path.read_text().splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in lines if " against " in line[:40]}
    assert rows["nft against sage"].endswith("+0.100 [+0.100, +0.100]: higher |")
    verdict = "higher" if has_control else "confounded"
    assert rows["draft against sage"].endswith(f"+0.200 [+0.200, +0.200]: {verdict} |")
    assert "| 2 | 9,984, 9,600 | 230, 122 |" in rows["draft against sage"]
    text = path.read_text()
    assert ("anchor_cfg_scale 3" in text and "control: true for draft" in text) != has_control
    # what guidance alone gains, and what the reward adds
    assert ("draft_control against sage" in rows) == has_control
    assert ("draft against draft_control" in rows) == has_control
    assert "- draft against sage: " in text and "anchor_cfg_scale 3.0 and none" in text


def test_recipes_that_both_have_a_guided_anchor_are_compared(tiny_config):
    configs = configs_of(guidance="miniature_guidance", draft="miniature_draft", sage="miniature")

    def reason(*names):
        return confounder(names, tuple(configs[name] for name in names), set())

    assert not reason("guidance", "draft")
    assert "only draft" in reason("sage", "draft") and "only draft" in reason("draft", "sage")
    without = configs["draft"].with_settings(anchor_cfg_scale=1.0)
    assert not confounder(("sage", "draft"), (configs["sage"], without), set())


def trace(seconds, reward):
    values = {"seconds": seconds, "Reward": reward, "True reward": [math.nan] * len(reward)}
    return {name: np.array(value, dtype=float) for name, value in values.items()}


def test_metrics_are_interpolated_at_the_budget_and_curves_end_there():
    slow, fast = trace([0, 10, 20], [1.0, 2.0, 4.0]), trace([0, 5, 10], [1.0, 3.0, 5.0])
    at_15 = at_cost(slow, "seconds", 15)
    assert (at_15["seconds"], at_15["Reward"]) == (15, 3.0) and np.isnan(at_15["True reward"])
    assert at_cost(fast, "seconds", 15)["seconds"] == 10  # the run ended before
    points = curve([slow, fast], "seconds", 15)
    assert [point["Reward"].mean for point in points] == [1.0, 3.5, 4.0]
    assert [point["seconds"].mean for point in points] == [0, 10, 12.5]
    half_width = 12.7062 * 1.0  # half the distance of two numbers, times the quantile
    assert (
        points[-1]["Reward"].high - 4.0 == pytest.approx(half_width, rel=1e-4)
        and "True reward" not in points[-1]
    )
    assert len(curve([slow], "seconds")) == 3 and len(curve([slow], "seconds", 20)) == 3


def test_results_of_seeds_become_a_table_of_seeds(tmp_path):
    scores = {
        "a": {3: {"True reward": np.array([1.5]), "Reward, seen prompts": np.array([2.0])}},
        "b": {3: {"True reward": np.array([np.nan]), "Reward, seen prompts": np.array([4.0])}},
    }
    write_csv(tmp_path / "seeds.csv", seed_rows(scores))
    table = read_seed_table(tmp_path / "seeds.csv")
    assert (table.heads, table.metrics) == (["recipe"], ["true_reward", "reward_seen_prompts"])
    assert table.values["a",]["true_reward"] == {"3": 1.5}
    assert table.values["b",] == {"true_reward": {}, "reward_seen_prompts": {"3": 4.0}}


@pytest.mark.parametrize("device, seconds", [("cpu", 6), ("NVIDIA H100 80GB HBM3", 8)])
def test_costs_are_cumulative_and_true_rewards_are_weighted(tmp_path, tiny_config, device, seconds):
    """Two processes; on a CPU, their CPU time counts, not the time that others used it."""
    study, run = (
        RecipeStudy("configs/miniature.yaml", tmp_path, num_gpus=2),
        RecipeRun(Recipe("a", ()), 0),
    )
    (study.folder(run) / "samples/000000").mkdir(parents=True)
    (study.folder(run) / "samples/000000/measures.json").write_text(
        '{"reward": 1.0, "spreads": {}}'
    )
    (study.folder(run) / "config.yaml").write_text(
        f"environment: {{processes: 2, device: {device}}}\n"
    )
    line = {"cost/forwards": 36, "time/iteration": 2.0, "time/cpu": 1.5}
    end = {"validation/reward": 2.0, "validation/unseen/reward": 1.5}
    end |= {f"validation/true/{name}": v for name, v in (("VQ", 1), ("MQ", 3), ("TA", 5))}
    lines = [
        {"iteration": 0, "validation/reward": 1.0},
        line | {"iteration": 1},
        line | {"iteration": 2} | end,
    ]
    (study.folder(run) / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    values = read_trace(study, run)
    assert values["rollouts"].tolist() == [0, 128] and values["forwards"].tolist() == [0, 128 * 36]
    assert values["seconds"].tolist() == [0, seconds] and values["Reward"].tolist() == [1, 2]
    assert (
        math.isnan(values["Reward, unseen prompts"][0])
        and values["Reward, unseen prompts"][1] == 1.5
    )
    assert values["True reward"][1] == 0.5 + 1.5 + 5 and math.isnan(values["True reward"][0])


@pytest.mark.system
@pytest.mark.parametrize(
    "path", sorted(Path("configs/recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_included_recipes_can_be_planned(path, tmp_path, monkeypatch, capfd):
    words = [
        "compare_recipes.py",
        str(path),
        "--budget",
        "forwards=60000",
        "--output_dir",
        str(tmp_path),
        "--dry_run",
    ]
    monkeypatch.setattr("sys.argv", words)
    assert compare_recipes.main() == 0
    assert f"{5 * len(read_recipes(str(path))[2])} cells, " in capfd.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        ({}, ""),
        ({"prompts": "1234"}, "other prompts than valid_video_csv"),
        ({"guidance": [3.0, ""]}, r"has guidance \[3.0, ''\] instead of \[1.0, ''\]"),
    ],
)
def test_validations_with_other_prompts_or_settings_are_not_compared(
    tmp_path, tiny_config, change, message
):
    study = RecipeStudy("configs/miniature.yaml", tmp_path)
    runs = [RecipeRun(Recipe("a", ()), 0), RecipeRun(Recipe("b", ()), 0)]
    config = study.config(runs[0])
    made_with = conditions_of(config, read_requests(*config.data.valid_video_csv))
    for run, iteration in itertools.product(runs, ("000000", "000010")):
        folder = study.folder(run) / "samples" / iteration
        folder.mkdir(parents=True)
        (folder / "measures.json").write_text(json.dumps({"made_with": made_with}))
    (folder / "measures.json").write_text(json.dumps({"made_with": made_with | change}))
    expected = nullcontext()
    if message:
        expected = pytest.raises(ValueError, match=f"b-seed0/samples/000010.*{message}")
    with expected:
        check_validations(study, runs)


def test_an_axis_has_all_means_and_not_more_of_a_long_interval():
    """The interval of two seeds of a distance reaches from 0 to 45, at a mean of 0.034."""
    means = np.array([0.016, 0.028, 0.034])
    low, high = np.array([[0.016, 0.007, 0.0], [0.016, 0.118, 45.3]])
    first, last = axis_of(np.stack([means, low, high]))
    assert first < 0.0 and means.max() < last < 0.1
    # intervals that fit are shown whole, and those of one seed are not known
    first, last = axis_of(np.stack([means, means - 0.01, means + 0.02]))
    assert -0.01 < first < 0.006 and 0.054 < last < 0.06
    first, last = axis_of(np.stack([means, *np.full((2, 3), math.nan)]))
    assert first < 0.016 and 0.034 < last < 0.04
    assert axis_of(np.full((3, 2), 0.5)) == (None, None) == axis_of(np.full((3, 2), math.nan))
