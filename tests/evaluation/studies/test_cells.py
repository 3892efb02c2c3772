"""The figures that need training runs: which runs, by which schedules, and the way from nothing to the picture."""

import pytest

from hyvideo.evaluation.studies.cells import Cell, runs_of_figure
from hyvideo.evaluation.studies.runs import Run, Study
from hyvideo.grpo.trust_region import KLCoefficient
from hyvideo.training.policy_update import kl_schedule
from scripts import reproduce_figures

SMOKE = "configs/smoke.yaml"
EXTRA = (
    "max_steps 1 grpo_sampling_steps 2 cfg_scale 1 num_updates_per_rollout 1 validation_steps 1 check_reward false "
    "log_num_videos 0"
)


def test_the_runs_of_a_figure_are_cells_of_the_table_or_more_of_their_kind():
    assert [run.name for run in runs_of_figure(8, "B", [0])] == [
        f"B-sage_grpo-{kl}-eq-seed0" for kl in ("none", "fixed", "stepwise", "moving", "dual_moving")
    ]
    assert {(run.recipe.method, run.recipe.kl) for run in runs_of_figure(3, "B", [0])} == {
        (method, "none") for method in ("dance_grpo", "flow_grpo", "cps", "sage_grpo")
    }
    assert len(runs_of_figure(3, "B", [0, 1])) == 16
    assert [run.name for run in runs_of_figure(7, "A", [3], methods=["cps"])] == [
        f"A-cps-dual_moving-eq-{schedule}-seed3" for schedule in ("constant", "two_stage", "milder")
    ]


@pytest.mark.parametrize("kl", [0.0, 1e-3, 1.0])
def test_the_milder_coefficient_is_never_above_two_stage_and_that_never_above_constant(tmp_path, tiny_config, kl):
    study = Study("configs/miniature_paper.yaml", tmp_path)
    constant, two_stage, milder = (
        KLCoefficient(kl_schedule(study.config(run).trust_region, "dual_moving")) for run in runs_of_figure(7, "B", [0])
    )
    for update in range(120):
        assert milder.value <= two_stage.value <= constant.value == 0.2
        if 1 <= update < 20:  # of a warm-up of 20 and of 40 updates
            assert milder.value < two_stage.value < constant.value
        for coefficient in (constant, two_stage, milder):
            coefficient.observe(kl)
    assert two_stage.value == 0.2 and (milder.value < 0.2) == (kl > 1e-3)


def test_the_milder_schedule_follows_the_settings_and_changes_nothing_else(tmp_path, tiny_config):
    study = Study("configs/miniature_paper.yaml", tmp_path, ["--kl_warmup_updates", "7", "--kl_gain=0.5"])
    plain, milder = (
        study.config(Run(Cell("B", "cps", "fixed", True, name), 0)).flat() for name in ("adaptive", "milder")
    )
    changed = {name: value for name, value in milder.items() if plain[name] != value and name != "output_dir"}
    assert changed == {"kl_warmup_updates": 14, "kl_gain": 0.25}


def test_what_a_figure_does_not_compare_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--figures includes 8"):
        runs_of_figure(8, "B", [0], schedules=["constant"])
    with pytest.raises(ValueError, match="--kl none has no KL"):
        runs_of_figure(7, "B", [0], kls=["none"])
    study = Study(SMOKE, tmp_path, ["--kl_schedule", "constant"])
    with pytest.raises(ValueError, match="--extra cannot set kl_schedule"):
        study.flags(runs_of_figure(7, "B", [0])[0])


@pytest.fixture
def reproduce(exit_code, tiny_config, forked_programs, capfd):
    def run(*flags):
        common = ["--config", SMOKE, "--seeds", "0", "--extra", EXTRA, "--window", "1"]
        code = exit_code(reproduce_figures.main, *common, *flags)
        return code, capfd.readouterr()

    return run


def test_figure_7_is_drawn_from_nothing_and_no_run_is_trained_twice(reproduce, tmp_path):
    flags = ["--figures", "7", "--schedules", "constant", "milder", "--out", tmp_path / "study"]
    code, said = reproduce(*flags, "--dry_run")
    assert code == 0 and "2 cells, 2 to run" in said.out and not (tmp_path / "study").exists()
    code, said = reproduce(*flags, "--jobs", "2")
    picture = tmp_path / "study/figures/figure7.png"
    assert code == 0 and said.out.count("seed0: trained") == 2 and f"figure 7: {picture}" in said.out
    picture.unlink()
    code, said = reproduce(*flags, "--only_figure")
    assert code == 0 and picture.is_file() and "2 cells, 0 to run" in said.out


def test_a_figure_whose_runs_are_not_finished_is_not_made(reproduce, tmp_path):
    code, said = reproduce("--figures", "8", "--out", tmp_path / "study", "--only_figure")
    assert code == 0 and "figure 8: skipped, no runs differ only in kl_strategy" in said.out
    assert reproduce("--only_cell", "nothing", "--out", tmp_path / "study")[0] == 2
