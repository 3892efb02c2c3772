"""Signals, hanging ranks, scorers that fail, and clocks that jump: the result equals that of an
uninterrupted run.
"""

import math
import re
import signal
import time
from itertools import cycle

import pytest

from hyvideo.trainer import Trainer
from tests.promises.runs import STAGES, Run
from tests.test_trainer import CPU, Redness
from tests.training.test_run_state import SETTINGS, train_iterations

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("uninterrupted"), max_steps=2)
    result = run.start()
    assert result.code == 0, result.output
    return run


def test_ctrl_c_exits_after_the_stage_and_twice_exits_at_once(uninterrupted, tmp_path):
    run = Run(tmp_path)
    result = run.start("rollout", 2, "INT INT")
    assert result.code == 130 and "Ctrl-C twice to exit at once" in result.output
    assert run.names() == ["000001"]
    result = run.start("update", 2, "INT")
    assert result.code == 75 and run.names() == ["000001", "000002"]
    assert run.metrics() == uninterrupted.metrics()


def test_a_closed_terminal_saves(tmp_path):
    run = Run(tmp_path)
    result = run.start("rollout", 2, "HUP", save_interval=9)
    assert result.code == 75 and "stopped by SIGHUP" in result.output
    assert run.names() == ["000001"]


# --- signals while a scorer hangs, and outside of training ----------------------------------------


@pytest.mark.slow
def test_a_scorer_that_hangs_does_not_keep_a_stopped_run_alive(tmp_path):
    # raises TimeoutExpired if it stays alive
    result = Run(tmp_path).start_with("hang_in_scorer", max_steps=1)
    assert result.code == 75 and "stopped by SIGUSR1" in result.output, result


@pytest.mark.parametrize(
    "place, kind, left",
    [
        pytest.param("load", "TERM", [], marks=pytest.mark.slow),
        ("load", "INT", []),
        ("summary", "USR1", [1]),
    ],
)
def test_a_signal_outside_of_training_ends_the_run_at_once_with_code_75(
    tmp_path, place, kind, left
):
    run, number = Run(tmp_path), signal.Signals[f"SIG{kind}"]
    result = run.start_with("signal_outside_of_training", place, int(number), max_steps=1)
    assert result.code == 75 and f"stopped by SIG{kind} outside of training" in result.output, (
        result
    )
    assert "Traceback" not in result.output
    assert sorted(path.name for path in run.out.glob("checkpoints/0*")) == [
        f"{iteration:06d}" for iteration in left
    ]


# --- a rank that hangs ----------------------------------------------------------------------------


def start_with_hanging_rank(folder, stage):
    """Start two ranks with a launcher; the second is stopped in a stage of iteration 2.

    Return the run and launcher.
    """
    run = Run(folder, collective_timeout=8, watchdog_seconds=3, max_steps=2)
    return run, run.launch("inject", str(run.log), stage, 2, "STOP", 1)


@pytest.fixture(scope="module", autouse=True)
def hanging(request, tmp_path_factory):
    """The run whose rank hangs in the stage ``anchor``: it mostly waits, so it starts before the
    tests of this file.
    """
    if not any("a_rank_that_hangs" in item.name for item in request.session.items):
        yield
        return
    started = start_with_hanging_rank(tmp_path_factory.mktemp("hanging"), "anchor")
    yield started
    started[1].kill()


# --- scorers and clocks ---------------------------------------------------------------------------


class Unreliable(Redness):
    """Is slow in iteration 2, fails in iteration 3 and returns NaN in iteration 4, each for one of
    two batches.
    """

    number = 0

    def score(self, videos, prompts, *, fps):
        self.number += 1
        scores = super().score(videos, prompts, fps=fps)
        if self.number == 4:
            time.sleep(0.5)
        if 6 <= self.number <= 9:  # the batch, its retry, and each of its videos
            raise ConnectionError("killed")
        return [scores[0] | {"VQ": math.nan}, *scores[1:]] if self.number == 11 else scores


def history(config, mesh, scorer, iterations):
    trainer = Trainer(config, mesh, CPU, scorers={"test": scorer})
    return train_iterations(trainer, iterations)


@pytest.mark.slow
def test_a_slow_scorer_changes_no_reward_and_a_failing_one_loses_only_its_own_rewards(
    tiny_config, mesh
):
    config = tiny_config.with_settings(**SETTINGS, lora_rank=2, max_missing_fraction=0.5)
    lines = history(config, mesh, Unreliable(), 4)
    assert [line["reward/missing"] for line in lines] == ["0.0", "0.0", "2.0", "1.0"]
    assert lines[:2] == history(config, mesh, Redness(), 2)
    assert all(math.isfinite(float(line["loss/total"])) for line in lines)


@pytest.mark.slow
def test_clocks_that_jump_do_not_change_the_results(tiny_config, mesh, monkeypatch):
    config = tiny_config.with_settings(**SETTINGS, lora_rank=2)
    expected = history(config, mesh, Redness(), 2)
    jumps = cycle((1e9, -1e9, 0.0, 3600.0))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    assert history(config, mesh, Redness(), 2) == expected


# --- the end of the rank that hangs ---------------------------------------------------------------


@pytest.mark.parametrize(
    "stage",
    [
        stage if stage == "anchor" else pytest.param(stage, marks=pytest.mark.slow)
        for stage in STAGES
    ],
)
def test_a_rank_that_hangs_is_reported_with_its_stage_and_ends_the_run(tmp_path, stage, hanging):
    run, launcher = hanging if stage == "anchor" else start_with_hanging_rank(tmp_path, stage)
    code, output = launcher.wait(timeout=300), run.output()
    assert code == 1, output
    # Rank 1 is stopped, so it prints nothing; rank 0 waits for it in this or a later stage.
    assert re.search(r"watchdog: rank 0 .* has been in stage .* of iteration 2 for 3 s", output)
    assert re.search(r"rank 0 .* ends in stage .* of iteration 2: ", output), output
    assert "000001" in run.names()
