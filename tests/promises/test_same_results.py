"""Promise 2: a resumed run equals the uninterrupted one, bit for bit on a CPU in the same layout.

Other layouts: tests/distributed/test_same_run.py and test_resharding.py. Kinds of weights and
trust regions: tests/training/test_run_state.py.
"""

import signal

import pytest

from tests.promises.runs import BATCHES, STAGES, Run

pytestmark = pytest.mark.system

FAULT_ITERATIONS = {stage: number for number, stage in enumerate(STAGES, start=2)}
LAST = len(STAGES) + 2


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("uninterrupted"), max_steps=LAST)
    result = run.start()
    assert result.code == 0, result.output
    assert len(run.sampled()) == LAST * BATCHES
    return run


@pytest.fixture(scope="module", params=["KILL", pytest.param("TERM", marks=pytest.mark.slow)])
def interrupted(request, tmp_path_factory):
    """A run that is interrupted in each of several stages and restarted each time."""
    run = Run(tmp_path_factory.mktemp(request.param), max_steps=LAST)
    codes, outputs, newest = {}, {}, {}
    for stage in STAGES if request.config.getoption("--slow") else ("rollout", "update", "save"):
        result = run.start(stage, FAULT_ITERATIONS[stage], request.param)
        codes[stage], outputs[stage] = result.code, result.output
        newest[stage] = max(path.name for path in (run.out / "checkpoints").glob("0*"))
    last = run.start()
    assert last.code == 0, last.output
    return request.param, run, codes, outputs, newest


def test_an_interrupted_process_leaves_a_checkpoint_of_its_last_finished_iteration(interrupted):
    kind, _, codes, outputs, newest = interrupted
    for stage in codes:
        iteration = FAULT_ITERATIONS[stage]
        assert codes[stage] == (-signal.SIGKILL if kind == "KILL" else 75), (stage, outputs[stage])
        # After SIGTERM, updates and saves are finished before the process exits.
        is_finished = kind == "TERM" and stage in ("update", "save")
        assert newest[stage] == f"{iteration - (not is_finished):06d}", stage
        if kind == "TERM":
            assert "stopped by SIGTERM" in outputs[stage] and "Traceback" not in outputs[stage], (
                outputs[stage]
            )


def test_a_run_with_many_restarts_equals_the_uninterrupted_run_bit_for_bit(
    interrupted, uninterrupted
):
    _, run, *_ = interrupted
    assert run.metrics() == uninterrupted.metrics()
    assert run.saved(LAST) == uninterrupted.saved(LAST)
    assert not list((run.out / "checkpoints").glob(".*"))


def test_only_rollouts_of_the_unfinished_iteration_are_repeated(interrupted, uninterrupted):
    kind, run, codes, *_ = interrupted
    repeated = {
        iteration
        for iteration, *_ in (sample for sample in run.sampled() if run.sampled().count(sample) > 1)
    }
    # No rollout is sampled before the end of the conditions stage; SIGTERM lets updates and saves
    # finish.
    without = ("conditions",) if kind == "KILL" else ("conditions", "update", "save")
    assert repeated == {FAULT_ITERATIONS[stage] for stage in codes if stage not in without}
    assert set(run.sampled()) == set(uninterrupted.sampled())
