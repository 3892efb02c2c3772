"""Grouping of runs, curves and files of the figures."""

import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
import yaml

from hyvideo.settings.command_line import load_config
from scripts import make_figures
from studies.figures.curves import MissingRuns, compare, curve, find_runs
from studies.figures.figures import COMPARED

original_plot = plt.Axes.plot
METRICS = ("reward/mean", "reward/std", "reward/VQ", "reward/MQ", "reward/TA", "kl/coef")


@pytest.fixture
def make_run(tmp_path, tiny_config):
    """Writes the records of a run whose reward is the iteration plus ``level``."""

    def make(name, *, level=0.0, iterations=6, metrics=METRICS, **settings):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        config = load_config("configs/smoke.yaml", output_dir=str(folder), **settings)
        known = {name: value for name, value in config.flat().items() if value is not None}
        (folder / "config.yaml").write_text(yaml.safe_dump(known))
        lines = [
            {"iteration": k} | {name: k + level for name in metrics}
            for k in range(1, iterations + 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return make


@pytest.fixture
def figures(exit_code, tmp_path, capsys):
    def run(*arguments):
        code = exit_code(make_figures.main, *arguments, "--out", tmp_path / "figures")
        made = sorted(path.name for path in (tmp_path / "figures").glob("*"))
        return code, made, capsys.readouterr()

    return run


def test_seeds_are_averaged_and_settings_are_not(make_run, tmp_path):
    for seed in (0, 1):
        make_run(f"with{seed}", seed=seed, level=seed)
        make_run(f"without{seed}", seed=seed, use_grad_balancing=False)
    make_run("other", use_grad_balancing=False, learning_rate=1e-3)
    (comparison,) = compare(find_runs([tmp_path / "runs"]), ["use_grad_balancing"])
    assert {variant: len(runs) for variant, runs in comparison.variants.items()} == {
        "use_grad_balancing False": 2,
        "use_grad_balancing True": 2,
    }
    found = curve(comparison.variants["use_grad_balancing True"], "reward/mean")
    assert found.iterations.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(found.mean, np.arange(1, 7) + 0.5)
    np.testing.assert_allclose(found.std, 0.5)


def test_a_curve_has_the_common_iterations_of_all_seeds_and_is_smoothed(make_run):
    runs = find_runs([make_run("long", iterations=6), make_run("short", iterations=4, seed=1)])
    found = curve(runs, "reward/mean", window=3)
    assert found.iterations.tolist() == [3, 4]
    np.testing.assert_allclose(found.mean, [2, 3])
    for name, window in (("reward/mean", 5), ("no/metric", 1)):
        with pytest.raises(MissingRuns, match=f"at least {window} iterations of {name}"):
            curve(runs, name, window=window)


def test_the_settings_of_a_trust_region_are_no_settings_of_a_run_without_one(make_run, tmp_path):
    make_run("fixed", kl_strategy="fixed")
    make_run("none", kl_weight=0.0, kl_gain=0.9)
    fixed, none = find_runs([tmp_path / "runs"])
    assert "kl_gain" in fixed.settings and "kl_gain" not in none.settings


def test_comparisons_are_labeled_by_the_settings_that_differ(make_run, tmp_path):
    for weights in ("averaged", "alignment"):
        for schedule in ("constant", "adaptive"):
            make_run(f"{weights}-{schedule}", reward_weights=weights, kl_schedule=schedule)
    found = compare(find_runs([tmp_path / "runs"]), COMPARED[7])
    assert {comparison.label for comparison in found} == {
        "reward_weights averaged",
        "reward_weights alignment",
    }


def test_a_schedule_is_labeled_with_its_warm_up_and_gain(make_run, tmp_path):
    make_run("constant", kl_schedule="constant")
    make_run("two_stage", kl_schedule="two_stage")
    make_run("milder", kl_schedule="adaptive", kl_warmup_updates=4, kl_gain=0.05)
    make_run("none", kl_weight=0.0)
    (comparison,) = compare(find_runs([tmp_path / "runs"]), COMPARED[7])
    assert {*comparison.variants} == {
        "kl_schedule adaptive, kl_warmup_updates 4, kl_gain 0.05",
        "kl_schedule constant, kl_warmup_updates 2, kl_gain 0.1",
        "kl_schedule two_stage, kl_warmup_updates 2, kl_gain 0.1",
    }


def test_every_trust_region_is_compared_with_runs_without_one(make_run, tmp_path):
    make_run("none", kl_weight=0.0)
    for schedule in ("constant", "adaptive"):
        for strategy in ("fixed", "dual_moving"):
            make_run(f"{schedule}-{strategy}", kl_schedule=schedule, kl_strategy=strategy)
    (comparison,) = compare(find_runs([tmp_path / "runs"]), COMPARED[8])
    assert {*comparison.variants} == {
        "kl_strategy none",
        "kl_strategy fixed, kl_schedule constant",
        "kl_strategy fixed, kl_schedule adaptive",
        "kl_strategy dual_moving, kl_schedule constant",
        "kl_strategy dual_moving, kl_schedule adaptive",
    }


def test_samplers_of_different_noise_are_separate_panels(make_run, figures, tmp_path):
    for eta in (0.5, 0.7):
        for has_equalizer in (True, False):
            make_run(f"{eta}-{has_equalizer}", eta=eta, use_grad_balancing=has_equalizer)
    found = compare(find_runs([tmp_path / "runs"]), COMPARED[3])
    assert [comparison.label for comparison in found] == ["eta 0.5", "eta 0.7"]
    assert figures(tmp_path / "runs", "--figures", "3")[1] == ["figure3.png"]


@pytest.mark.system
def test_figures_are_drawn_from_runs(make_run, figures, tmp_path):
    for seed in (0, 1):
        make_run(f"equalized{seed}", seed=seed)
        make_run(f"plain{seed}", seed=seed, use_grad_balancing=False)
        make_run(f"none{seed}", seed=seed, kl_weight=0.0)
        make_run(f"constant{seed}", seed=seed, kl_schedule="constant")
    code, made, output = figures(tmp_path / "runs")
    assert code == 0 and made == ["figure3.png", "figure7.png", "figure8.png"]
    assert "learning curve: skipped, it needs runs that differ only in their seed" in output.out


@pytest.mark.slow
def test_the_learning_curve_needs_runs_of_one_setting(make_run, figures, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        plt.Axes,
        "plot",
        lambda axes, x, y, **more: drawn.append([*y]) or original_plot(axes, x, y, **more),
    )
    for seed in (0, 1):
        make_run(f"seed{seed}", seed=seed, level=seed, iterations=3 + seed)
    code, made, output = figures(tmp_path / "runs" / "seed0", "--figures", "0")
    assert code == 0 and made == ["learning_curve.png"] and "learning curve: " in output.out
    assert drawn == [[2.0]] * 4, "reward, VQ, MQ and TA: means of the three iterations"
    drawn.clear()
    figures(tmp_path / "runs", "--figures", "0")
    assert drawn == [[2.5]] * 4
    make_run("other", learning_rate=1e-3)
    output = figures(tmp_path / "runs", "--figures", "0")[2].out
    assert (
        output == "learning curve: skipped, it needs runs that differ only in their seed, got 2 "
        "different settings\n"
    )


@pytest.mark.system
def test_a_figure_without_its_runs_is_skipped(make_run, figures):
    code, made, output = figures(make_run("one"))
    assert code == 0 and made == ["learning_curve.png"]
    assert "figure 7: skipped, no runs differ only in kl_schedule" in output.out


def test_a_missing_metric_is_named(make_run, figures, tmp_path):
    make_run("equalized")
    make_run("plain", use_grad_balancing=False, metrics=["reward/mean"])
    make_run("fixed", kl_strategy="fixed", metrics=["reward/mean"])
    code, made, output = figures(tmp_path / "runs", "--figures", "3", "8")
    assert code == 0 and made == ["figure3.png"]
    assert (
        "figure 8: skipped" in output.out
        and "must contain at least 5 iterations of reward/std" in output.out
    )


def test_a_folder_without_runs_is_an_error(figures, tmp_path):
    code, _, output = figures(tmp_path)
    assert code == 2 and "no metrics.jsonl beside a config.yaml" in output.err
    assert "nowhere" in figures(tmp_path / "nowhere")[2].err
