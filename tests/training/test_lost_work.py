"""Nothing is lost: a run keeps files that are not its own, corrupted checkpoints, and its work
after any error.
"""

import json
import math
import os
import shutil
import warnings

import pytest

from hyvideo.data import run_folder
from hyvideo.distributed import manifest
from hyvideo.distributed.mesh import Mesh
from hyvideo.trainer import Trainer
from tests.forked import ROOT
from tests.test_trainer import CPU, Redness
from tests.training.test_run_state import SETTINGS, files, snapshot, train_iterations

SMALL = SETTINGS | {
    "lora_rank": 2,
    "ema_decay": 0.0,
    "save_asynchronously": False,
    "save_interval": 50,
    "save_total_limit": 0,
    "max_steps": 2,
    "num_updates_per_rollout": 1,
    "mini_batch_size_per_update": 4,
}


@pytest.fixture
def config(tiny_config):
    return tiny_config.with_settings(**SMALL)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Return the folder of a run of three iterations, with checkpoints 2 and 3 and videos of each
    iteration.
    """
    from hyvideo.settings.command_line import load_config

    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        config = load_config(
            "configs/smoke.yaml", output_dir=str(folder), **SHORT | SMALL | {"max_steps": 3}
        )
        config = config.with_settings(save_interval=2, log_video_interval=1)
        make(config).train()
    return folder


SHORT = {"valid_video_csv": "", "cfg_scale": 1.0, "report_to": "none", "report": False}


def make(config, scorer=None):
    return Trainer(config, Mesh.single(), CPU, scorers={"test": scorer or Redness()})


@pytest.fixture
def resumed(finished_run, tmp_path, config):
    """Return a copy of the finished run and the settings that resume it for one more iteration."""
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder, symlinks=True)
    changes = {
        "resume_from_checkpoint": "latest",
        "max_steps": 4,
        "log_video_interval": 1,
        "save_interval": 2,
    }
    return folder, config.with_settings(output_dir=str(folder), **changes)


def as_earlier_version(folder):
    """Remove the identity and the marks, which earlier versions did not write."""
    for mark in [*folder.rglob(".run")]:
        mark.unlink()
    for file in folder.glob("checkpoints/*/manifest.json"):
        entries = json.loads(file.read_text())
        del entries[".run"]
        file.write_text(json.dumps(entries, indent=1, sort_keys=True))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- corrupted and absent checkpoints -------------------------------------------------------------


def damage(folder, how):
    state = folder / "state.json"
    if how == "empty manifest":
        (folder / "manifest.json").write_text("{}")
        return
    state.unlink()
    if how == "folder":
        state.mkdir()
    elif how == "pipe":
        os.mkfifo(state)


@pytest.mark.system
@pytest.mark.parametrize("how", ["missing", "folder", "pipe", "empty manifest"])
def test_a_run_whose_checkpoints_are_all_damaged_keeps_everything_and_stops(resumed, how, capsys):
    folder, config = resumed
    shutil.rmtree(folder / "checkpoints" / "000002")
    damage(folder / "checkpoints" / "000003", how)
    before = files(folder)
    with pytest.raises(
        ValueError,
        match="are corrupted and kept: 000003; restore one of them from a copy, or start",
    ):
        make(config)
    assert files(folder) == before
    assert "skipping corrupted checkpoint" in capsys.readouterr().err


@pytest.mark.system
@pytest.mark.parametrize("how", ["missing", "empty manifest"])
def test_a_run_resumes_from_an_older_checkpoint_and_keeps_the_damaged_one(resumed, how, capsys):
    folder, config = resumed
    damage(folder / "checkpoints" / "000003", how)
    kept = {
        path.name: path.read_bytes()
        for path in (folder / "checkpoints" / "000003").rglob("*.distcp")
    }
    trainer = make(config)
    assert trainer.iteration == 2
    trainer.train()
    assert names(folder / "checkpoints") == ["000002", "000003-damaged", "000004", "latest"]
    kept_folder = folder / "checkpoints" / "000003-damaged"
    assert {path.name: path.read_bytes() for path in kept_folder.rglob("*.distcp")} == kept
    assert "is kept as 000003-damaged" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["dangling link", "empty folder", "no folder"])
@pytest.mark.parametrize("is_earlier", [False, True])
def test_results_without_checkpoints_are_kept_and_the_run_stops(resumed, how, is_earlier):
    folder, config = resumed
    if is_earlier:
        as_earlier_version(folder)
    shutil.rmtree(folder / "checkpoints")
    if how == "dangling link":
        (folder / "checkpoints").symlink_to("/mnt/not_mounted")
    elif how == "empty folder":
        (folder / "checkpoints").mkdir()
    before = files(folder)
    message = (
        "has results, but no checkpoint in checkpoints to resume; found metrics.jsonl up to "
        "iteration 3, rollouts"
    )
    with pytest.raises(
        ValueError, match="which does not exist; mount" if how == "dangling link" else message
    ):
        make(config)
    assert files(folder) == before


def test_a_new_run_does_not_replace_the_checkpoints_of_a_run_whose_metrics_are_gone(resumed):
    folder, config = resumed
    (folder / "metrics.jsonl").unlink()
    before = files(folder)
    message = (
        "has results of a run that would be replaced; found checkpoints/.*Set "
        "resume_from_checkpoint latest to continue this run"
    )
    with pytest.raises(ValueError, match=message):
        make(config.with_settings(resume_from_checkpoint=""))
    assert files(folder) == before


# --- files of others ------------------------------------------------------------------------------


@pytest.mark.parametrize("resume_from", ["", "latest", "auto"])
@pytest.mark.parametrize(
    "name", ["config.yaml", "report.html", "samples/000001/mine", "rollouts/000000/000.mp4"]
)
def test_a_first_start_rejects_files_of_others_that_it_would_replace(
    config, tmp_path, resume_from, name
):
    mine = tmp_path / "run" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    found = name if "/" not in name else name.rpartition("/")[0]
    with pytest.raises(ValueError, match=f"output_dir .*{found}.*choose another output_dir"):
        make(config.with_settings(resume_from_checkpoint=resume_from))
    assert mine.read_text() == "mine" and list(files(tmp_path / "run")) == [mine]


@pytest.mark.system
@pytest.mark.parametrize("resume_from", ["", "latest"])
def test_a_run_leaves_numbered_folders_of_others_untouched(config, tmp_path, resume_from):
    mine = [
        tmp_path / "run" / name / "mine"
        for name in ("samples/20240101", "rollouts/7", "rollouts/20240101")
    ]
    for path in mine:
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    make(config.with_settings(resume_from_checkpoint=resume_from, max_steps=1)).train()
    make(config.with_settings(resume_from_checkpoint="latest", max_steps=2)).train()
    assert all(path.read_text() == "mine" for path in mine)


def test_a_checkpoints_folder_of_others_is_named_and_not_deleted(config, tmp_path):
    mine = tmp_path / "run" / "checkpoints" / "20240101" / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(ValueError, match="checkpoints/20240101"):
        make(config.with_settings(resume_from_checkpoint="latest"))
    make(config).train()
    assert mine.read_text() == "mine"


def test_only_own_checkpoints_are_rotated_out(resumed):
    """A user has added a checkpoint of another run and a note."""
    folder, config = resumed
    added = folder / "checkpoints" / "000001"
    shutil.copytree(folder / "checkpoints" / "000002", added)
    (folder / "checkpoints" / "000002" / "note.txt").write_text("mine")
    make(config.with_settings(save_total_limit=1)).train()
    assert names(folder / "checkpoints") == ["000001", "000002-kept", "000004", "latest"]
    assert (folder / "checkpoints" / "000002-kept" / "note.txt").read_text() == "mine"


def test_videos_are_not_written_into_a_folder_that_appears_during_the_run(config, tmp_path, capsys):
    trainer = make(config.with_settings(log_video_interval=1, max_steps=1))
    mine = tmp_path / "run" / "rollouts" / "000001" / "scores.json"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    trainer.train()
    assert mine.read_text() == "mine" and names(mine.parent) == ["scores.json"]
    assert "NOT WRITTEN (FileExistsError" in capsys.readouterr().err


def test_a_file_where_a_folder_must_be_and_a_folder_where_a_file_must_be_are_rejected(
    config, tmp_path
):
    (tmp_path / "run" / "checkpoints" / "latest").mkdir(parents=True)
    with pytest.raises(
        ValueError, match="checkpoints/latest' must be a regular file, got a folder"
    ):
        make(config)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples").touch()
    with pytest.raises(ValueError, match="samples' must be a folder, got a file"):
        make(config)
    (tmp_path / "run" / "samples").unlink()
    os.mkfifo(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(
        ValueError, match="metrics.jsonl' must be a regular file, got something else"
    ):
        make(config)


# --- runs of earlier versions ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_of_an_earlier_version_resumes_with_the_same_results_and_its_folders_are_marked(
    resumed, tmp_path
):
    folder, config = resumed
    make(config).train()
    earlier = tmp_path / "earlier"
    shutil.copytree(folder, earlier)
    for parent in ("checkpoints", "rollouts"):
        shutil.rmtree(earlier / parent / "000004")
    (earlier / "checkpoints" / "latest").write_text("000003\n")
    as_earlier_version(earlier)
    mine = earlier / "samples" / "20240101" / "mine"
    mine.parent.mkdir(parents=True)
    mine.touch()
    trainer = make(config.with_settings(output_dir=str(earlier), save_total_limit=2))
    assert trainer.iteration == 3
    trainer.train()
    tensors = [manifest_entries(run / "checkpoints" / "000004") for run in (folder, earlier)]
    assert tensors[0] == tensors[1]
    assert names(earlier / "checkpoints") == ["000003", "000004", "latest"] and mine.exists()
    run = run_folder.read_record(earlier).run
    assert all(run_folder.is_marked(path, run) for path in (earlier / "rollouts").iterdir())


def manifest_entries(folder):
    entries = json.loads((folder / manifest.NAME).read_text())
    return {
        name: entry for name, entry in entries.items() if name.endswith((".distcp", "model.json"))
    }


def test_a_moved_checkpoints_folder_is_resumed_with_its_identity(resumed):
    folder, config = resumed
    for path in list(folder.iterdir()):
        if path.name != "checkpoints":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(config).train()
    assert names(folder / "checkpoints") == ["000002", "000003", "000004", "latest"]


# --- errors of any part ---------------------------------------------------------------------------


class Failing:
    """Raises RuntimeError at a given iteration, in place of a function of the trainer."""

    def __init__(self, trainer, owner, name, iteration):
        self.trainer = trainer
        self.function = getattr(owner, name)
        self.iteration = iteration
        setattr(owner, name, self)

    def __call__(self, *arguments, **options):
        if self.trainer.iteration == self.iteration:
            raise RuntimeError("planted")
        return self.function(*arguments, **options)


PLACES = {  # the function that fails in iteration 3, and the iteration that is saved
    "rollout": (lambda trainer: (trainer.run.collector, "sample"), 2),
    "record": (lambda trainer: (trainer.run.recorder, "record"), 2),
    "update": (lambda trainer: (trainer.run.objective, "terms"), 2),
    "validation": (lambda trainer: (trainer.validation, "videos"), 3),
    "report": (lambda trainer: (trainer, "_report"), 3),
    "timeline": (lambda trainer: (trainer, "_write_timeline"), 3),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    from hyvideo.settings.command_line import load_config

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        folder = tmp_path_factory.mktemp("uninterrupted") / "run"
        config = load_config("configs/smoke.yaml", output_dir=str(folder), **SHORT | SMALL)
        trainer = make(with_validation(config).with_settings(max_steps=4))
        trainer.train()
    return snapshot(trainer)


def with_validation(config):
    settings = {"valid_video_csv": ["assets/miniature/prompts/smoke.csv"], "validation_steps": 1}
    return config.with_settings(
        **settings, validate_at_step0=False, validation_interval=3, max_steps=4
    )


@pytest.mark.system
@pytest.mark.parametrize(
    "place",
    [
        place if place == "rollout" else pytest.param(place, marks=pytest.mark.slow)
        for place in PLACES
    ],
)
def test_the_last_finished_iteration_is_saved_after_an_error_and_resumes_bit_for_bit(
    config, uninterrupted, place, capsys
):
    owner_of, saved = PLACES[place]
    config = with_validation(config)
    trainer = make(config)
    Failing(trainer, *owner_of(trainer), 3)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    assert f"iteration {saved} is saved, the last finished one" in capsys.readouterr().err
    assert names(trainer.output_dir / "checkpoints") == [f"{saved:06d}", "latest"]
    resumed = make(config.with_settings(resume_from_checkpoint="latest"))
    assert resumed.iteration == saved
    resumed.train()
    (tensors, numbers), (expected, expected_numbers) = snapshot(resumed), uninterrupted
    assert numbers == expected_numbers
    assert all(tensor.equal(expected[name]) for name, tensor in tensors.items())
    lines = [
        json.loads(line) for line in (trainer.output_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    assert all("validation/reward" in line for line in lines[2:])


def test_an_iteration_whose_weights_have_begun_to_change_is_not_saved_as_the_one_before(
    config, capsys
):
    trainer = make(config.with_settings(max_steps=3, save_interval=1))
    Failing(trainer, trainer.run.policy, "after_update", 3)
    Failing(trainer, trainer.run.checkpoints, "_publish", 2)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    assert "cannot be saved: an optimizer step of the next one" in capsys.readouterr().err
    assert names(trainer.output_dir / "checkpoints") == ["000001", "latest"]


def test_too_many_skipped_updates_save_the_counters_of_the_last_finished_iteration(config):
    trainer = make(config.with_settings(max_bad_updates=2, max_steps=4))
    step = trainer.run.update._step

    def bad(*arguments):
        if trainer.iteration > 1:
            trainer.run.policy.parameters[0].grad.fill_(math.nan)
        return step(*arguments)

    trainer.run.update._step = bad
    with pytest.raises(FloatingPointError):
        trainer.train()
    state = json.loads((trainer.output_dir / "checkpoints" / "000002" / "state.json").read_text())
    assert state["iteration"] == 2 and state["update"] == 1 and state["health"]["bad_in_a_row"] == 1


def test_a_failed_save_does_not_hide_the_error(config, capsys):
    trainer = make(config)
    Failing(trainer, trainer.run.collector, "sample", 2)
    Failing(trainer, trainer.run.policy, "tensors", 1)
    with pytest.raises(RuntimeError, match="planted") as raised:
        trainer.train()
    assert "sample" in str(raised.traceback[-2])
    assert "cannot be saved: RuntimeError: planted" in capsys.readouterr().err


class HeldOut(Redness):
    """Its held-out methods fail from the second validation on."""

    calls = 0

    def __init__(self, method):
        self.method = method

    def fail(self):
        self.calls += 1
        if self.calls > 1:
            raise SystemExit("late") if self.method == "exit" else RuntimeError("late")

    def held_out_each(self, videos, prompts):
        if self.method in ("held_out_each", "exit"):
            self.fail()
        return [{"brightness": 1.0} for _ in videos]

    def held_out(self, videos, prompts):
        import torch

        from hyvideo.rewards.rewards import SetMeasure

        if self.method == "held_out":
            self.fail()
        rows = torch.ones(len(videos), 2)
        return {
            "spread": SetMeasure(
                rows, lambda rows: self.fail() or 1.0 if self.method == "of_set" else 1.0
            )
        }


@pytest.mark.system
@pytest.mark.parametrize(
    "method",
    ["held_out_each", "of_set"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("exit", "held_out")],
)
def test_a_held_out_metric_that_fails_later_is_missing_with_a_warning(config, method, capsys):
    config = with_validation(config).with_settings(validation_interval=1, max_steps=2)
    trainer = make(config, HeldOut(method))
    trainer.train()
    first, second = (
        json.loads(line) for line in (trainer.output_dir / "metrics.jsonl").read_text().splitlines()
    )
    name = "validation/brightness" if method in ("held_out_each", "exit") else "validation/spread"
    assert name in first and name not in second and "validation/reward" in second
    shown = capsys.readouterr().err
    assert "held-out metrics of reward" in shown or "the held-out metric spread is missing" in shown


# --- the process's state that a scorer changes ----------------------------------------------------


class Moving(Redness):
    """Changes the working directory in every call."""

    def __init__(self, folder):
        self.folder = folder

    def score(self, videos, prompts, *, fps):
        os.chdir(self.folder)
        return super().score(videos, prompts, fps=fps)


@pytest.mark.system
def test_a_scorer_may_change_the_working_directory(config, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    prompts = tmp_path / "valid.csv"
    prompts.write_text("prompt\nred\n")
    (tmp_path / "weights").symlink_to(ROOT / SETTINGS["pretrained_model_root"])
    monkeypatch.chdir(tmp_path)
    paths = {
        "output_dir": "run",
        "valid_video_csv": ["valid.csv"],
        "pretrained_model_root": "weights",
    }
    config = with_validation(config).with_settings(
        **paths, validation_interval=1, max_steps=2, log_video_interval=1
    )
    make(config, Moving(tmp_path / "elsewhere")).train()
    assert os.getcwd() == str(tmp_path) and not os.listdir(tmp_path / "elsewhere")
    assert names(tmp_path / "run" / "checkpoints") == ["000002", "latest"]
    state = json.loads((tmp_path / "run" / "checkpoints" / "000002" / "state.json").read_text())
    # as given, so that the folder can be moved
    assert {name: state["settings"][name] for name in paths} == paths
    os.chdir(tmp_path)
    resumed = make(config.with_settings(resume_from_checkpoint="latest", max_steps=3))
    assert resumed.iteration == 2 and resumed.run.state.changed_settings == [
        "max_steps is 3 and was 2"
    ]


def test_a_scorer_may_turn_warnings_into_errors(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = make(config)
        train_iterations(trainer, 1)
        trainer.run.state.save()
        trainer.run.checkpoints.wait()
    assert not trainer.run.checkpoints.last_failed


@pytest.mark.slow
def test_a_run_that_fails_after_the_first_iteration_was_recorded_has_one_line_of_the_base_model(
    config,
):
    config = with_validation(config).with_settings(
        validate_at_step0=True, validation_interval=1, max_steps=2
    )
    trainer = make(config)
    Failing(trainer, trainer, "_report", 1)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    make(config.with_settings(resume_from_checkpoint="latest")).train()
    lines = (trainer.output_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [0, 1, 2]
