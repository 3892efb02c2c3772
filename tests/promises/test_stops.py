"""Promise 3: a signal to the launcher saves the last finished iteration and ends with 75; the exit
code of a rank is the launcher's. Promise 4, in part: no rank outlives the launcher or a lost rank.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from hyvideo.files.run_folder import STOPPED, RunRecord, read_record, write_record
from scripts.launch import has_saved
from tests.forked import ROOT, python
from tests.promises.runs import Run

# As nohup does, before torchrun replaces the handlers.
NOHUP = (
    "import runpy, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    "runpy.run_module('scripts.launch', run_name='__main__', alter_sys=True)"
)


def wait_until(path, process):
    end = time.monotonic() + 90
    while not path.exists():
        assert time.monotonic() < end and process.poll() is None, f"missing: {path}"
        time.sleep(0.05)


@pytest.fixture
def started(tmp_path):
    """Start a run of two ranks that waits in its second iteration; yield it and its launcher."""
    launchers = []

    def start(**options):
        run = Run(tmp_path, save_interval=9)
        waits, go = tmp_path / "waits", tmp_path / "go"
        launcher = run.launch("wait_in_iteration", 2, str(waits), str(go), **options)
        launchers.append(launcher)
        wait_until(waits, launcher)
        return run, launcher

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.wait()


@pytest.mark.parametrize(
    "name",
    ["USR1", *(pytest.param(name, marks=pytest.mark.system) for name in ("TERM", "HUP"))],
)
def test_a_signal_to_the_launcher_saves_the_last_finished_iteration(started, tmp_path, name):
    run, launcher = started()
    launcher.send_signal(signal.Signals[f"SIG{name}"])
    (tmp_path / "go").touch()
    assert launcher.wait(timeout=60) == 75, run.output()
    assert run.names() == ["000001"] and read_record(run.out).end == STOPPED


@pytest.mark.system
def test_a_closed_terminal_is_ignored_with_nohup(started, tmp_path):
    run, launcher = started(launcher=("-c", NOHUP))
    launcher.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert launcher.wait(timeout=60) == 0, run.output()
    assert run.names() == ["000003"]


@pytest.mark.system
def test_a_second_signal_does_not_interrupt_the_save(started, tmp_path):
    """Slurm signals every process of a job, and train_grpo.sh the launcher once more."""
    run, launcher = started()
    launcher.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    launcher.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert launcher.wait(timeout=60) == 75, run.output()
    assert run.names() == ["000001"]


def test_the_end_of_a_run_is_read_in_the_folder_that_the_run_writes(tmp_path, monkeypatch):
    """Shells leave the ~ of --output_dir=~/run to the program."""
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ["--config", "configs/smoke.yaml", "--output_dir=~/run"]
    write_record(tmp_path / "run", RunRecord(run="1"))
    assert not has_saved(flags, began=0)
    write_record(tmp_path / "run", RunRecord(run="1", end=STOPPED))
    assert has_saved(flags, began=0)


@pytest.mark.system
@pytest.mark.parametrize("shutdown_timeout, code, saved", [(60, 75, 2), (1, 1, 1)])
def test_75_means_that_the_run_had_the_time_to_save(tmp_path, shutdown_timeout, code, saved):
    run, saving = Run(tmp_path), tmp_path / "saving"
    flags = [f"--shutdown-timeout={shutdown_timeout}"]
    launcher = run.launch("save_slowly", 2, str(saving), 6, flags=flags)
    wait_until(saving, launcher)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=60) == code, run.output()
    complete = [name for name in run.names() if not name.startswith(".")]
    assert complete == [f"{iteration:06d}" for iteration in range(1, saved + 1)]
    assert (read_record(run.out).end == STOPPED) == (code == 75)


@pytest.mark.system
def test_a_rank_that_is_killed_ends_all_ranks_with_1(tmp_path):
    run = Run(tmp_path)
    began = time.monotonic()
    launcher = run.launch("inject", str(run.log), "anchor", 2, "KILL", 1)
    assert launcher.wait(timeout=90) == 1
    assert time.monotonic() - began < 60 and "000001" in run.names()
    output = run.output()
    assert "Signal 9 (SIGKILL)" in output and "rank 0" in output and "ends in stage" in output


RANK = """
import time
from hyvideo.settings import processes
processes.exit_on_signals()
print("ready", flush=True)
time.sleep(60)
"""


def test_a_rank_ends_when_its_launcher_is_killed():
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RANK!r}])"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", launcher], env=environment, cwd=ROOT, **pipes
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
        _, errors = process.communicate(timeout=20)  # until the rank has closed its pipes, too
    assert "stopped by SIGUSR1" in errors


@pytest.mark.parametrize(
    "end, code",
    [
        ("sys.exit(2)", 2),
        ("sys.exit(75)", 75),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.system),
        ("os.kill(os.getpid(), 9)", 1),
        ("print(os.environ['OMP_NUM_THREADS'])", 0),
    ],
)
def test_the_launcher_returns_the_exit_code_of_the_rank_that_failed(tmp_path, end, code):
    worker = tmp_path / "worker.py"
    worker.write_text(f"import os, sys\nif os.environ['RANK'] == '1':\n    {end}\n")
    command = [python(), "-m", "scripts.launch", "--standalone", "--nproc_per_node=2", str(worker)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHON_EXEC": sys.executable}, capture_output=True
    )
    assert result.returncode == code, result.stderr.decode()
    assert code or result.stdout == b"1\n"
