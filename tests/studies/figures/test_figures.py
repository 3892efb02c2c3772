"""Grouping of runs, curves and files of the figures."""

import json

import numpy as np
import pytest
import yaml

from hyvideo.settings.command_line import load_config
from scripts import figures as program
from studies.figures.curves import compare, curve, find_runs

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
        code = exit_code(program.main, "runs", *arguments, "--output_dir", tmp_path / "figures")
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


@pytest.mark.system
def test_figures_are_drawn_from_runs(make_run, figures, tmp_path):
    for seed in (0, 1):
        make_run(f"equalized{seed}", seed=seed)
        make_run(f"plain{seed}", seed=seed, use_grad_balancing=False)
        make_run(f"none{seed}", seed=seed, kl_weight=0.0)
        make_run(f"constant{seed}", seed=seed, kl_schedule="constant")
    code, made, output = figures(tmp_path / "runs")
    assert code == 0 and made == ["figure3.png", "figure7.png", "figure8.png"]
    assert "skipped" in output.out
