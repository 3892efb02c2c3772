"""Signals outside of training and to hanging scorers, and a rank that hangs."""

import re
import signal

import pytest

from tests.promises.runs import Run

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
    assert result.code == -signal.SIGINT and "Ctrl-C again to exit at once" in result.output
    assert run.names() == ["000001"]
    result = run.start("update", 2, "INT")
    assert result.code == 75 and run.names() == ["000001", "000002"]
    assert run.metrics() == uninterrupted.metrics()


# --- signals while a scorer hangs, and outside of training ----------------------------------------


@pytest.mark.slow
def test_a_scorer_that_hangs_does_not_keep_a_stopped_run_alive(tmp_path):
    # raises TimeoutExpired if it stays alive
    result = Run(tmp_path).start_with("hang_in_scorer", max_steps=1)
    assert result.code == 75 and "stopped by SIGUSR1" in result.output, result


@pytest.mark.parametrize(
    "place, kind, left",
    [("load", "INT", []), ("summary", "USR1", [1])],
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


def test_a_rank_that_hangs_is_reported_with_its_stage_and_ends_the_run(tmp_path):
    run = Run(tmp_path, timeout=16, max_steps=2)
    launcher = run.launch("inject", str(run.log), "anchor", 2, "STOP", 1)
    code, output = launcher.wait(timeout=300), run.output()
    assert code == 1, output
    # Rank 1 is stopped, so it prints nothing; rank 0 waits for it in this or a later stage.
    assert re.search(r"watchdog: rank 0 .* has been in stage .* of iteration 2 for 8 s", output)
    assert re.search(r"rank 0 .* ends in stage .* of iteration 2: ", output), output
    assert "000001" in run.names()
