"""A signal stops the run at the next pass, in any stage, without losing results."""

import os
import signal
import threading
from pathlib import Path

import pytest

from hyvideo.trainer import Trainer
from hyvideo.training.preemption import PreemptionSignals, Stopped
from tests.test_trainer import CPU, Redness
from tests.training.test_run_state import SETTINGS

SECOND_UPDATE = ("update", 4, 3)


@pytest.fixture
def config(tiny_config, tmp_path):
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("prompt\nred\nblue\n")
    settings = {
        "lora_rank": 2,
        "max_steps": 4,
        "valid_video_csv": [str(prompts)],
        "validation_interval": 2,
    }
    settings |= {
        "validate_at_step0": False,
        "validation_steps": 2,
        "save_interval": 9,
        "save_asynchronously": False,
    }
    return tiny_config.with_settings(**SETTINGS | settings)


class Slow(Redness):
    """Waits for the event ``released`` before it scores."""

    def __init__(self):
        self.released = threading.Event()
        self.released.set()

    def score(self, videos, prompts, *, fps):
        assert self.released.wait(60)
        return super().score(videos, prompts, fps=fps)


def train(config, mesh, stage="", number=0, iteration=0):
    """Train until a signal in the given stage; return the trainer, the message, and the stages
    entered afterwards.
    """
    entered, scorer = [], Slow()

    def on_stage(name, at):
        if entered or (name, at) == (stage, iteration):
            entered.append(name)
        if (name, at) == (stage, iteration) and entered.count(stage) == number + 1:
            entered[:] = ["signaled"]
            if stage == "reward":
                scorer.released.clear()
            os.kill(os.getpid(), signal.SIGUSR1)

    trainer = Trainer(config, mesh, CPU, scorers={"test": scorer}, on_stage=on_stage)
    try:
        trainer.train()
    except Stopped as error:
        scorer.released.set()
        return trainer, str(error), entered[1:]
    return trainer, "", []


@pytest.mark.parametrize("validates", [False, True])
def test_a_signal_during_a_batch_stops_the_run_before_the_next_denoising_step(
    config, mesh, validates
):
    trainer = Trainer(
        config.with_settings(validate_at_step0=validates), mesh, CPU, scorers={"test": Slow()}
    )
    pipeline = trainer.validation.pipeline if validates else trainer.run.pipeline
    velocity, begun = pipeline.velocity_at_steps, []

    def interrupted(latents, schedule, steps, conditions):
        begun.append((steps[0], len(schedule.transitions) > 1))
        os.kill(os.getpid(), signal.SIGUSR1)
        return velocity(latents, schedule, steps, conditions)

    pipeline.velocity_at_steps = interrupted
    with pytest.raises(Stopped, match="SIGUSR1"):
        trainer.train()
    assert begun == [(0, True)]


@pytest.mark.system
def test_a_signal_during_the_base_validation_stops_the_run_with_nothing_to_save(config, mesh):
    settings = {"validate_at_step0": True, "max_steps": 1, "resume_from_checkpoint": "latest"}
    config = config.with_settings(**settings)
    trainer, message, entered = train(config, mesh, "validation", 0, 0)
    assert "SIGUSR1" in message and set(entered) <= {"validation"}
    assert not [*trainer.output_dir.glob("checkpoints/*"), *trainer.output_dir.glob("samples/*")]
    trainer, message, _ = train(config, mesh)
    assert not message and trainer.validation.measures(0)


@pytest.mark.slow
def test_after_its_first_optimizer_step_an_iteration_is_finished(config, mesh):
    trainer, message, entered = train(config.with_settings(save_minutes=1e-9), mesh, *SECOND_UPDATE)
    assert "SIGUSR1" in message and trainer.iteration == 3 and trainer.run.update.update_count == 6
    assert "after update" in entered and "rollout" not in entered
    folder = Path(config.record.output_dir) / "checkpoints"
    # because of save_minutes
    assert sorted(path.name for path in folder.glob("0*")) == ["000001", "000002", "000003"]


def test_only_a_second_ctrl_c_exits_at_once_and_no_signal_to_a_rank(mesh, monkeypatch):
    """A rank receives Ctrl-C from the terminal and from its launcher. A run of large videos on a CPU
    did not end: an operator took a minute, and a handler in Python waited for its end.
    """
    with PreemptionSignals(mesh) as signals:
        assert signal.getsignal(signal.SIGINT) == signals._handle
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        signal.raise_signal(signal.SIGUSR1)
        assert signals.received == "SIGUSR1"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with PreemptionSignals(mesh) as signals:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert signals.received == "SIGINT"
