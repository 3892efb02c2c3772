"""A run keeps its work after an error in any part, and survives what scorers do to the process."""

import json
import math
import os

import pytest

from hyvideo.distributed.mesh import Mesh
from hyvideo.trainer import Trainer
from hyvideo.training.rewards import TooManyMissingRewards
from tests.forked import ROOT
from tests.test_trainer import CPU, Redness
from tests.training.test_run_state import SETTINGS

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


def make(config, scorer=None):
    return Trainer(config, Mesh.single(), CPU, scorers={"test": scorer or Redness()})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- errors of any part ---------------------------------------------------------------------------


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
    config = config.with_settings(
        **paths, validation_steps=1, validation_interval=1, max_steps=2, log_video_interval=1
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
