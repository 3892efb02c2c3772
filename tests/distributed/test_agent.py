"""Tests of shutdown and restart of a node's processes: real agents with small worker programs."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from hyvideo.distributed import agent as launcher
from tests.forked import ROOT, python

WORKER = """
import json, os, sys, time
from pathlib import Path
from hyvideo.distributed.mesh import Mesh
from hyvideo.training.preemption import PreemptionSignals
rank, folder = int(os.environ["RANK"]), Path(sys.argv[sys.argv.index("--output_dir") + 1])
starts = folder / "starts"
with open(starts, "a") as file:
    print(rank, os.environ["TORCHELASTIC_RESTART_COUNT"], file=file)
num_starts = len(starts.read_text().splitlines())
"""
WAITS_FOR_SIGNAL = """
with PreemptionSignals(Mesh.single()) as signals:
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    os.rename(folder / f"pid{rank}", folder / f"ready{rank}")
    while not signals.received and not os.path.exists(folder / f"fail{rank}"):
        time.sleep(0.05)
    (folder / f"received{rank}").write_text(str(signals.received))
sys.exit(75 if signals.received else 1)
"""
ALL_RANKS_FAIL = """
from hyvideo.settings import processes
processes.wait_for_rank_0()
print("common message", os.environ["PYTORCH_ALLOC_CONF"], flush=True)
sys.exit(1)
"""
PROGRESSES = """
if num_starts <= 2:
    with open(folder / "metrics.jsonl", "a") as file:
        print(json.dumps({"iteration": num_starts}), file=file)
sys.exit(1)
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts an agent; all agents and their processes are killed after the
    test.
    """
    agents = []

    def start(program, processes=2, *flags, launcher=("-m", "scripts.launch")):
        (tmp_path / "worker.py").write_text(WORKER + program)
        options = ["--standalone", f"--nproc_per_node={processes}", *flags]
        command = [
            python(),
            *launcher,
            *options,
            str(tmp_path / "worker.py"),
            "--output_dir",
            str(tmp_path),
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHON_EXEC": python(),
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        agents.append(subprocess.Popen(command, env=environment, cwd=ROOT, **pipes))
        return agents[-1]

    yield start
    for agent in agents:
        agent.kill()
    # its processes hold the pipe open
    for file in [*tmp_path.glob("ready*"), *tmp_path.glob("pid*")]:
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)
    for agent in agents:
        agent.communicate()


def wait_until(*paths):
    end = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"missing: {paths}"
        time.sleep(0.05)


@pytest.mark.system
def test_healthy_and_stopped_ranks_are_ended_at_once_when_another_fails(start, tmp_path):
    agent = start(WAITS_FOR_SIGNAL, 3, "--shutdown-timeout=100")
    wait_until(*(tmp_path / f"ready{rank}" for rank in range(3)))
    os.kill(int((tmp_path / "ready2").read_text()), signal.SIGSTOP)
    (tmp_path / "fail1").touch()
    began = time.monotonic()
    output = agent.communicate(timeout=60)[0]
    assert agent.returncode == 1 and time.monotonic() - began < 25, output
    assert not (tmp_path / "received0").exists() and "rank      : 1" in output


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signalled_agent_signals_its_processes_and_waits_for_them(start, tmp_path, number):
    agent = start(WAITS_FOR_SIGNAL)
    wait_until(tmp_path / "ready0", tmp_path / "ready1")
    agent.send_signal(signal.SIGUSR1)  # Slurm sends it to all processes
    time.sleep(0.2)
    agent.send_signal(number)
    output = agent.communicate(timeout=60)[0]
    assert agent.returncode == 75, output
    assert [(tmp_path / f"received{rank}").read_text() for rank in (0, 1)] == ["SIGUSR1", "SIGUSR1"]


def test_with_nohup_the_agent_ignores_a_closed_terminal(start, tmp_path):
    """torchrun alone would end the run, because it replaces the handler that nohup has set."""
    nohup = "import signal, runpy; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    nohup += "runpy.run_module('scripts.launch', run_name='__main__', alter_sys=True)"
    agent = start(WAITS_FOR_SIGNAL, 1, launcher=("-c", nohup))
    wait_until(tmp_path / "ready0")
    agent.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert agent.poll() is None and not (tmp_path / "received0").exists()
    agent.send_signal(signal.SIGTERM)
    output = agent.communicate(timeout=60)[0]
    assert agent.returncode == 75, output
    assert (tmp_path / "received0").read_text() == "SIGUSR1"


@pytest.mark.system
def test_a_second_signal_ends_the_processes(start, tmp_path):
    agent = start(
        WAITS_FOR_SIGNAL.replace("not signals.received", "True"), 1, "--shutdown-timeout=100"
    )
    wait_until(tmp_path / "ready0")
    agent.send_signal(signal.SIGINT)
    time.sleep(0.5)
    agent.send_signal(signal.SIGINT)
    agent.communicate(timeout=20)
    assert agent.returncode == 75


RANK = """
import time
from hyvideo.settings import processes
processes.exit_on_signals()
print("ready", flush=True)
time.sleep(60)
"""


def test_a_rank_ends_when_its_launcher_is_gone():
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RANK!r}])"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", launcher], env=environment, cwd=ROOT, **pipes
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
        _, errors = process.communicate(timeout=20)  # until the rank has closed its pipes, too
    assert "stopped by SIGUSR1 outside of training" in errors


@pytest.mark.parametrize("code", [2, 75])
def test_final_exit_codes_are_not_restarted(start, tmp_path, code):
    agent = start(f"sys.exit({code})", 1, "--max-restarts=3")
    output = agent.communicate(timeout=60)[0]
    assert agent.returncode == code, output
    assert (tmp_path / "starts").read_text() == "0 0\n"


def test_restarts_are_counted_since_the_last_new_iteration(start, tmp_path):
    agent = start(PROGRESSES, 1, "--max-restarts=1")
    output = agent.communicate(timeout=60)[0]
    assert agent.returncode == 1, output
    # Two starts finish one iteration each; the third and last finishes none. No restart number is
    # used twice.
    assert (tmp_path / "starts").read_text() == "0 0\n0 1\n0 2\n"
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_a_message_common_to_all_ranks_is_printed_once_and_the_allocator_is_configured(
    start, monkeypatch
):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    agent = start(ALL_RANKS_FAIL)
    output = agent.communicate(timeout=60)[0]
    assert agent.returncode == 1 and output.count("common message expandable_segments:True") == 1, (
        output
    )


@pytest.mark.parametrize("processes, threads", [(1, None), (2, "1")])
def test_processes_of_a_node_use_one_thread_each(monkeypatch, processes, threads):
    seen = []
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(launcher.signal, "signal", lambda *_: None)
    monkeypatch.setattr(launcher.api, "LocalElasticAgent", launcher.api.LocalElasticAgent)
    monkeypatch.setattr(
        launcher.run, "main", lambda _: seen.append(os.environ.get("OMP_NUM_THREADS"))
    )
    assert launcher.main([f"--nproc_per_node={processes}", "worker.py"], lambda flags: 0) == 0
    assert seen == [threads]
