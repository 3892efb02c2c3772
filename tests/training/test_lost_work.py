"""A run keeps its work after an error that all ranks have, and survives what scorers do to the
process.
"""

import json
import math
import os

import pytest

from hyvideo.distributed.mesh import Mesh
from hyvideo.trainer import Trainer
from hyvideo.training.on_policy_check import OffPolicyError
from hyvideo.training.rewards import TooManyMissingRewards
from tests.forked import ROOT
from tests.test_trainer import CPU, Redness
from tests.training.test_run_state import SETTINGS, snapshot

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


SHORT = {"valid_video_csv": "", "cfg_scale": 1.0, "report_to": "none", "report": False}


def make(config, scorer=None):
    return Trainer(config, Mesh.single(), CPU, scorers={"test": scorer or Redness()})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- errors of any part ---------------------------------------------------------------------------


class Failing:
    """Raises an error that all ranks have at a given iteration, in place of a function of the
    trainer.
    """

    def __init__(self, trainer, owner, name, iteration):
        self.trainer = trainer
        self.function = getattr(owner, name)
        self.iteration = iteration
        setattr(owner, name, self)

    def __call__(self, *arguments, **options):
        if self.trainer.iteration == self.iteration:
            raise OffPolicyError("planted")
        return self.function(*arguments, **options)


PLACES = {  # the function that fails in iteration 3, and the iteration that is saved
    "rollout": (lambda trainer: (trainer.run.source, "sample"), 2),
    "validation": (lambda trainer: (trainer.validation, "videos"), 3),
    "report": (lambda trainer: (trainer, "_report"), 3),
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


class MissingFrom(Redness):
    """Returns no finite scores from a call on."""

    def __init__(self, first):
        self.first, self.calls = first, 0

    def score(self, videos, prompts, *, fps):
        self.calls += 1
        scores = super().score(videos, prompts, fps=fps)
        if self.calls < self.first:
            return scores
        return [dict.fromkeys(each, math.nan) for each in scores]


def test_a_resumed_run_that_fails_saves_the_iteration_that_it_has_finished(config):
    """Also where the number of updates is another one."""
    config = config.with_settings(num_updates_per_rollout=2, mini_batch_size_per_update=2)
    make(config.with_settings(max_steps=1)).train()
    batches = config.rollout.gradient_accumulation_steps
    resumed = make(config.with_settings(max_steps=4), MissingFrom(batches + 1))
    assert resumed.iteration == 1 and resumed.run.update.update_count == 2
    with pytest.raises(TooManyMissingRewards, match="iteration 3"):
        resumed.train()
    assert names(resumed.output_dir / "checkpoints") == ["000001", "000002"]


@pytest.mark.system
@pytest.mark.parametrize(
    "place",
    [
        place if place == "rollout" else pytest.param(place, marks=pytest.mark.slow)
        for place in PLACES
    ],
)
def test_the_last_finished_iteration_is_saved_after_an_error_and_resumes_bit_for_bit(
    config, uninterrupted, place
):
    owner_of, saved = PLACES[place]
    config = with_validation(config)
    trainer = make(config)
    Failing(trainer, *owner_of(trainer), 3)
    with pytest.raises(OffPolicyError, match="planted"):
        trainer.train()
    assert names(trainer.output_dir / "checkpoints") == [f"{saved:06d}"]
    resumed = make(config)
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
    Failing(trainer, trainer.run.state.checkpoints, "_write_digests", 2)
    with pytest.raises(OffPolicyError, match="planted"):
        trainer.train()
    assert "cannot be saved: an optimizer step of the next one" in capsys.readouterr().err
    assert names(trainer.output_dir / "checkpoints") == ["000001"]


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
    Failing(trainer, trainer.run.source, "sample", 2)
    Failing(trainer, trainer.run.policy, "tensors", 1)
    with pytest.raises(OffPolicyError, match="planted") as raised:
        trainer.train()
    assert "sample" in str(raised.traceback[-2])
    assert "cannot be saved: OffPolicyError: planted" in capsys.readouterr().err


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
    assert names(tmp_path / "run" / "checkpoints") == ["000002"]
    state = json.loads((tmp_path / "run" / "checkpoints" / "000002" / "state.json").read_text())
    # as given, so that the folder can be moved
    assert {name: state["settings"][name] for name in paths} == paths
    os.chdir(tmp_path)
    resumed = make(config.with_settings(max_steps=3))
    assert resumed.iteration == 2 and resumed.run.state.changed_settings == [
        "max_steps is 3 and was 2"
    ]
