import json
import os
import signal
import subprocess

import pytest
import yaml

from hyvideo.files.cli import Parser
from hyvideo.files.run_folder import RunRecord, write_record
from hyvideo.loading.input_digests import digest_inputs
from hyvideo.settings.run_inputs import RunInputs
from studies.recipes.runs import RecipeRun, RecipeStudy, progress
from studies.recipes.train_runs import (
    command,
    describe,
    plan_run,
)
from studies.tables.cells import KL_FLAGS, Cell
from studies.tables.study_command import add_grid_flags, grid_study, plan_and_train
from tests.forked import ROOT, python

CELL = RecipeRun(Cell("B", "flow_grpo", "fixed", False), 2)
SMOKE = "configs/smoke.yaml"


@pytest.fixture
def study(tmp_path, tiny_config):
    return RecipeStudy(SMOKE, tmp_path / "table", ["--max_steps", "2"])


def write_run(study, cell, *, iterations, checkpoint=None, **changes):
    """Write the files of a run with ``iterations`` lines of metrics."""
    folder = study.folder(cell)
    folder.mkdir(parents=True)
    lines = [json.dumps({"iteration": k}) for k in range(1, iterations + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    settings = {
        name: value for name, value in study.config(cell).flat().items() if value is not None
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | changes | {"environment": {}}))
    if checkpoint is not None:
        (folder / f"checkpoints/{checkpoint:06d}").mkdir(parents=True)
        (folder / f"checkpoints/{checkpoint:06d}/digests.json").write_text("{}")


def test_a_cell_has_the_settings_in_its_name(study):
    config = study.config(CELL)
    assert CELL.name == "B-flow_grpo-fixed-noeq-seed2"
    assert (config.reward.reward_weights, config.rollout.sde_type) == ("alignment", "flow_grpo")
    assert (config.objective.strategy, config.objective.use_grad_balancing, config.data.seed) == (
        "fixed",
        False,
        2,
    )
    assert config.record.output_dir.endswith("table/cells/B-flow_grpo-fixed-noeq-seed2")
    assert config.optimizer.max_steps == 2 and config.model.num_threads == 1
    assert config.record.resume_from_checkpoint == "auto"


@pytest.mark.parametrize("kl", KL_FLAGS)
def test_every_kl_strategy_can_be_planned(study, kl):
    cell = RecipeRun(Cell("A", "sage_grpo", kl, True), 0)
    assert study.config(cell).objective.strategy == kl
    assert plan_run(study, cell).left == 1.0


def options_of(*flags):
    parser = Parser("a study")
    add_grid_flags(parser, makes="table")
    return parser.parse_args(list(map(str, flags)))


def test_a_cell_on_several_gpus_is_started_by_torchrun(tmp_path):
    assert "scripts.launch" not in command(RecipeStudy(SMOKE, tmp_path), CELL)
    words = command(RecipeStudy(SMOKE, tmp_path, num_gpus=8), CELL)
    launcher, flags = " ".join(words).split("post_train.py ")
    assert "-m scripts.launch --standalone --nproc_per_node 8 " in launcher
    assert flags.split() == RecipeStudy(SMOKE, tmp_path).flags(CELL)


def test_cells_can_be_evaluated_with_other_scorers(tmp_path, tiny_config):
    study = RecipeStudy(SMOKE, tmp_path, scorers=["miniature_videoalign", "clip"])
    assert study.evaluation_config().reward.reward_model == ["miniature_videoalign", "clip"]
    assert study.config(CELL).reward.reward_model == ["miniature"]
    options = options_of("--config", SMOKE, "--dry_run")
    assert plan_and_train(study, [CELL], options) == 0
    with pytest.raises(ValueError, match="got 'beauty'"):
        plan_and_train(RecipeStudy(SMOKE, tmp_path, scorers=["beauty"]), [CELL], options)


def test_extra_flags_are_parsed_and_cannot_set_flags_of_the_cells(tmp_path):
    study = grid_study(options_of("--config", SMOKE, "--extra", "--max_steps 3 --eta 0.5"))
    assert study.extra == ["--max_steps", "3", "--eta", "0.5"]
    for extra, name in (("--seed=3", "seed"), ("--sde-type cps", "sde_type")):
        with pytest.raises(ValueError, match=f"cannot set {name}"):
            grid_study(options_of("--config", SMOKE, f"--extra={extra}"))


def test_an_interrupted_cell_resumes_from_its_last_checkpoint(study):
    write_run(study, CELL, iterations=1, checkpoint=1)
    assert study.config(CELL).record.resume_from_checkpoint == "auto"
    plan = plan_run(study, CELL)
    assert (plan.progress.saved, plan.left, plan.progress.is_finished) == (1, 0.5, False)


@pytest.mark.parametrize("checkpoint, is_finished", [(2, True), (None, False)])
def test_a_run_without_its_last_checkpoint_is_not_finished(study, checkpoint, is_finished):
    write_run(study, CELL, iterations=2, checkpoint=checkpoint)
    state = progress(study.folder(CELL), study.config(CELL))
    assert state.is_finished is is_finished and state.saved == (checkpoint or 0)


def test_a_cell_with_other_settings_raises_value_error(study):
    write_run(study, CELL, iterations=1, eta=0.1, log_video_interval=7)
    with pytest.raises(ValueError, match="eta 0.1"):
        progress(study.folder(CELL), study.config(CELL))


def record_inputs(study):
    """Write the record of a run of the cell, with the digests of its inputs."""
    config = study.config(CELL)
    inputs = digest_inputs(config, RunInputs(config), {"text"})
    write_record(study.folder(CELL), RunRecord(run="0f", inputs=inputs))


def test_a_cell_that_was_trained_on_other_prompts_raises_value_error(tmp_path, tiny_config):
    """The cells that are not trained yet would be compared with it."""
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("prompt\na red circle moves up\na blue square moves left\n")
    study = RecipeStudy(
        SMOKE, tmp_path / "table", ["--max_steps", "2", "--prompts_csv", str(prompts)]
    )
    write_run(study, CELL, iterations=2, checkpoint=2)
    record_inputs(study)
    assert progress(study.folder(CELL), study.config(CELL)).is_finished
    with prompts.open("a") as file:
        file.write("a green triangle moves down\n")
    with pytest.raises(ValueError, match="prompts_csv"):
        progress(study.folder(CELL), study.config(CELL))


def test_the_plan_counts_rollouts_and_forward_passes_and_writes_nothing(study):
    cells = [RecipeRun(Cell("A", "sage_grpo", kl, True), 0) for kl in ("none", "fixed")]
    without, with_anchor = (plan_run(study, cell) for cell in cells)
    # 8 rollouts of 4 steps in 2 branches; 3 trained steps cost 3 each, and 1 more with the anchor;
    # 2 validations.
    validation = 8 * 4 * 2
    assert without.rollouts == with_anchor.rollouts == 16
    assert without.forwards == 16 * 2 * (4 + 3 * 3) + 2 * validation
    assert with_anchor.forwards - without.forwards == 16 * 2 * 3
    assert "2 cells, 2 to run: 32 rollouts" in describe(study, [without, with_anchor])
    assert not study.out.exists()


def test_a_stopped_study_ends_its_runs(study, tmp_path):
    """A run that continued would block its folder for the next start."""
    number = signal.SIGTERM
    started = tmp_path / "pid"
    (tmp_path / "sleep.py").write_text(
        f"import os, pathlib, time; pathlib.Path({str(started)!r}).write_text(str(os.getpid())); "
        "time.sleep(60)"
    )
    program = f"""
import os, signal, threading, time
from pathlib import Path
from studies.recipes import train_runs
from studies.tables.cells import Cell
from studies.recipes.runs import RecipeRun, RecipeStudy

def stop():
    while not (Path({str(started)!r}).is_file() and Path({str(started)!r}).read_text()):
        time.sleep(0.01)
    os.kill(os.getpid(), {int(number)})

train_runs.POST_TRAIN = {str(tmp_path / "sleep.py")!r}
threading.Thread(target=stop).start()
study = RecipeStudy({SMOKE!r}, Path({str(tmp_path)!r}))
train_runs.train_runs(study, [RecipeRun(Cell("B", "flow_grpo", "fixed", False), 2)], jobs=1)
"""
    ended = subprocess.run(
        [python(), "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 128 + number, ended.stderr
    assert not os.path.exists(f"/proc/{started.read_text()}")
