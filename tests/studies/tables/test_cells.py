"""Figures that need training runs: their runs, their KL schedules, and a figure drawn from new
runs.
"""

import pytest

from hyvideo.grpo.trust_region import KLCoefficient
from hyvideo.training.policy_update import kl_schedule
from scripts import reproduce_figures
from studies.recipes.runs import Run, Study
from studies.tables.cells import Cell, runs_of_figure
from tests.shallow import SHALLOW

SMOKE = "configs/smoke.yaml"
EXTRA = (
    f"--pretrained_model_root {SHALLOW} --max_steps 1 --grpo_sampling_steps 2 --cfg_scale 1 "
    "--num_updates_per_rollout 1 --validation_steps 1 --check_reward false --log_num_videos 0 "
    "--report false"
)


def test_the_runs_of_each_figure():
    assert [run.name for run in runs_of_figure(8, "B", [0])] == [
        f"B-sage_grpo-{kl}-eq-seed0"
        for kl in ("none", "fixed", "stepwise", "moving", "dual_moving")
    ]
    assert {(run.recipe.method, run.recipe.kl) for run in runs_of_figure(3, "B", [0])} == {
        (method, "none") for method in ("dance_grpo", "flow_grpo", "cps", "sage_grpo")
    }
    assert len(runs_of_figure(3, "B", [0, 1])) == 16
    assert [run.name for run in runs_of_figure(7, "A", [3], methods=["cps"])] == [
        f"A-cps-dual_moving-eq-{schedule}-seed3" for schedule in ("constant", "two_stage", "milder")
    ]


@pytest.mark.parametrize("kl", [0.0, 1e-3, 1.0])
def test_milder_never_exceeds_two_stage_which_never_exceeds_constant(tmp_path, tiny_config, kl):
    study = Study("configs/miniature_paper.yaml", tmp_path)
    configs = [study.config(run) for run in runs_of_figure(7, "B", [0])]
    constant, two_stage, milder = (KLCoefficient(kl_schedule(config)) for config in configs)
    for update in range(120):
        assert milder.value <= two_stage.value <= constant.value == 0.2
        if 1 <= update < 20:  # warm-ups of 20 and 40 updates
            assert milder.value < two_stage.value < constant.value
        for coefficient in (constant, two_stage, milder):
            coefficient.observe(kl)
    assert two_stage.value == 0.2 and (milder.value < 0.2) == (kl > 1e-3)


def test_the_schedules_of_figure_7_count_updates(tmp_path):
    study = Study("configs/paper/table2_b_8gpu.yaml", tmp_path)
    assert [study.config(run).kl_warmup for run in runs_of_figure(7, "B", [0])] == [100, 100, 200]
    (table2,) = (
        study.config(run)
        for run in runs_of_figure(3, "B", [0], methods=["cps"])
        if run.recipe.has_equalizer
    )
    assert table2.rollout.reference_conventions and table2.kl_warmup == 1.25


def test_the_milder_schedule_changes_only_warm_up_and_gain(tmp_path, tiny_config):
    study = Study(
        "configs/miniature_paper.yaml", tmp_path, ["--kl_warmup_updates", "7", "--kl_gain=0.5"]
    )
    plain, milder = (
        study.config(Run(Cell("B", "cps", "fixed", True, name), 0)).flat()
        for name in ("constant", "milder")
    )
    changed = {
        name: value
        for name, value in milder.items()
        if plain[name] != value and name != "output_dir"
    }
    assert changed == {"kl_schedule": "adaptive", "kl_warmup_updates": 14, "kl_gain": 0.25}


def test_figure_7_without_a_kl_raises_value_error():
    with pytest.raises(ValueError, match="--kl none has no KL"):
        runs_of_figure(7, "B", [0], kls=["none"])


@pytest.fixture
def reproduce(exit_code, tiny_config, forked_programs, capfd):
    def run(*flags):
        common = ["--config", SMOKE, "--seeds", "0", "--extra", EXTRA, "--window", "1"]
        code = exit_code(reproduce_figures.main, *common, *flags)
        return code, capfd.readouterr()

    return run


@pytest.mark.slow
def test_figure_7_is_drawn_and_no_run_is_trained_twice(reproduce, tmp_path):
    flags = ["--figures", "7", "--out", tmp_path / "study"]
    code, output = reproduce(*flags, "--dry_run")
    assert code == 0 and "3 cells, 3 to run" in output.out and not (tmp_path / "study").exists()
    code, output = reproduce(*flags, "--jobs", "2")
    picture = tmp_path / "study/figures/figure7.png"
    assert (
        code == 0
        and output.out.count("seed0: trained") == 3
        and f"figure 7: {picture}" in output.out
    )
    picture.unlink()
    code, output = reproduce(*flags, "--only_figure")
    assert code == 0 and picture.is_file() and "3 cells, 0 to run" in output.out


def test_a_figure_without_finished_runs_is_skipped(reproduce, tmp_path):
    code, output = reproduce("--figures", "8", "--out", tmp_path / "study", "--only_figure")
    assert code == 0 and "figure 8: skipped, no runs differ only in kl_strategy" in output.out
    assert reproduce("--only_cell", "nothing", "--out", tmp_path / "study")[0] == 2
    code, output = reproduce(
        "--figures", "7", "--extra", "--kl_schedule constant", "--out", tmp_path / "study"
    )
    assert code == 2 and "cannot set kl_schedule" in output.err
