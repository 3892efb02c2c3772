"""Figures that need training runs: their runs, their KL schedules, and a figure drawn from new
runs.
"""

import pytest

from hyvideo.loss.trust_region import KLCoefficient
from hyvideo.training.policy_update import kl_schedule
from scripts import figures
from studies.recipes.runs import RecipeRun, RecipeStudy
from studies.tables.cells import Cell, runs_of_figure
from tests.shallow import SHALLOW

SMOKE = "configs/smoke.yaml"
EXTRA = (
    f"--pretrained_model_root {SHALLOW} --max_steps 1 --grpo_sampling_steps 2 --cfg_scale 1 "
    "--num_updates_per_rollout 1 --validation_steps 1 --log_num_videos 0 "
    "--report false"
)


@pytest.mark.parametrize("kl", [0.0, 1e-3, 1.0])
def test_milder_never_exceeds_two_stage_which_never_exceeds_constant(tmp_path, tiny_config, kl):
    study = RecipeStudy("configs/miniature_paper.yaml", tmp_path)
    configs = [study.config(run) for run in runs_of_figure(7, "B", [0])]
    constant, two_stage, milder = (KLCoefficient(kl_schedule(config)) for config in configs)
    for update in range(120):
        assert milder.value <= two_stage.value <= constant.value == 0.2
        if 1 <= update < 20:  # warm-ups of 20 and 40 updates
            assert milder.value < two_stage.value < constant.value
        for coefficient in (constant, two_stage, milder):
            coefficient.observe(kl)
    assert two_stage.value == 0.2 and (milder.value < 0.2) == (kl > 1e-3)


def test_the_milder_schedule_changes_only_the_warm_up(tmp_path, tiny_config):
    study = RecipeStudy("configs/miniature_paper.yaml", tmp_path, ["--kl_warmup_updates", "7"])
    plain, milder = (
        study.config(RecipeRun(Cell("B", "cps", "fixed", True, name), 0)).flat()
        for name in ("constant", "milder")
    )
    changed = {
        name: value
        for name, value in milder.items()
        if plain[name] != value and name != "output_dir"
    }
    assert changed == {"kl_schedule": "adaptive", "kl_warmup_updates": 14}


@pytest.fixture
def reproduce(exit_code, tiny_config, forked_programs, capfd):
    def run(*flags):
        common = ["--config", SMOKE, "--seeds", "0", "--extra", EXTRA, "--window", "1"]
        code = exit_code(figures.main, "paper", *common, *flags)
        return code, capfd.readouterr()

    return run


@pytest.mark.slow
def test_figure_7_is_drawn_and_no_run_is_trained_twice(reproduce, tmp_path):
    flags = ["--figures", "7", "--output_dir", tmp_path / "study"]
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
