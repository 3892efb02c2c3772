"""How the processes of a node leave, end and are started again: real agents, with small programs in their care."""

import os
import signal
import subprocess
import time

import pytest

from tests.forked import ROOT, python

WORKER = """
import json, os, sys, time
from pathlib import Path
from hyvideo.distributed.mesh import Mesh
from hyvideo.training.preemption import PreemptionSignals
rank, folder = int(os.environ["RANK"]), Path(sys.argv[sys.argv.index("--output_dir") + 1])
lives = folder / "lives"
with open(lives, "a") as file:
    print(rank, os.environ["TORCHELASTIC_RESTART_COUNT"], file=file)
life = len(lives.read_text().splitlines())
"""
LISTENS = """
with PreemptionSignals(Mesh(0, 1, 1)) as signals:
    (folder / f"ready{rank}").touch()
    while not signals.received and not os.path.exists(folder / f"fail{rank}"):
        time.sleep(0.05)
    (folder / f"heard{rank}").write_text(str(signals.received))
sys.exit(75 if signals.received else 1)
"""
FAILS_ALIKE = """
from hyvideo.config import processes
processes.wait_for_turn()
print("one for all", flush=True)
sys.exit(1)
"""
PROGRESSES = """
if life <= 2:
    with open(folder / "metrics.jsonl", "a") as file:
        print(json.dumps({"iteration": life}), file=file)
sys.exit(1)
"""


@pytest.fixture
def start(tmp_path):
    """Starts an agent of two processes, or of so many; whatever runs at the end is ended."""
    agents = []

    def start(program, processes=2, *flags):
        (tmp_path / "worker.py").write_text(WORKER + program)
        launcher = ["-m", "scripts.launch", "--standalone", f"--nproc_per_node={processes}", *flags]
        command = [python(), *launcher, str(tmp_path / "worker.py"), "--output_dir", str(tmp_path)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON_EXEC": python()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        agents.append(subprocess.Popen(command, env=environment, cwd=ROOT, **pipes))
        return agents[-1]

    yield start
    for agent in agents:
        agent.kill()
        agent.communicate()


def wait_until(*paths):
    end = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"not there: {paths}"
        time.sleep(0.05)


def test_a_healthy_rank_ends_at_once_when_another_has_failed(start, tmp_path):
    agent = start(LISTENS, 2, "--shutdown-timeout=100")
    wait_until(tmp_path / "ready0", tmp_path / "ready1")
    (tmp_path / "fail1").touch()
    began = time.monotonic()
    told = agent.communicate(timeout=60)[0]
    assert agent.returncode == 1 and time.monotonic() - began < 25, told
    assert not (tmp_path / "heard0").exists() and "rank      : 1" in told


def test_an_agent_that_is_asked_to_leave_asks_its_processes_and_waits_for_them(start, tmp_path):
    agent = start(LISTENS)
    wait_until(tmp_path / "ready0", tmp_path / "ready1")
    agent.send_signal(signal.SIGUSR1)  # as Slurm does, to all
    time.sleep(0.2)
    agent.send_signal(signal.SIGTERM)
    told = agent.communicate(timeout=60)[0]
    assert agent.returncode == 75, told
    assert [(tmp_path / f"heard{rank}").read_text() for rank in (0, 1)] == ["SIGUSR1", "SIGUSR1"]


def test_an_agent_that_is_asked_twice_ends_its_processes(start, tmp_path):
    agent = start(LISTENS.replace("not signals.received", "True"), 1, "--shutdown-timeout=100")
    wait_until(tmp_path / "ready0")
    agent.send_signal(signal.SIGINT)
    time.sleep(0.5)
    agent.send_signal(signal.SIGINT)
    agent.communicate(timeout=20)
    assert agent.returncode == 75


@pytest.mark.parametrize("code", [2, 75])
def test_what_would_fail_again_is_not_started_again(start, tmp_path, code):
    agent = start(f"sys.exit({code})", 1, "--max-restarts=3")
    told = agent.communicate(timeout=60)[0]
    assert agent.returncode == code, told
    assert (tmp_path / "lives").read_text() == "0 0\n"


def test_failures_count_since_the_run_last_got_further(start, tmp_path):
    agent = start(PROGRESSES, 1, "--max-restarts=1")
    told = agent.communicate(timeout=60)[0]
    assert agent.returncode == 1, told
    # Two lives finish an iteration each; the third and last comes no further. No number is given twice.
    assert (tmp_path / "lives").read_text() == "0 0\n0 1\n0 2\n"
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_what_all_ranks_have_to_say_is_said_once(start):
    agent = start(FAILS_ALIKE)
    told = agent.communicate(timeout=60)[0]
    assert agent.returncode == 1 and told.count("one for all") == 1, told
