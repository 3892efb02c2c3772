"""The soak of scripts/soak.py, short; docs/reliability.md has the figures of a long one."""

import json
import os
import random
import signal
import subprocess
import sys

import pytest

from scripts import soak
from tests.forked import python


@pytest.mark.slow
def test_a_run_killed_again_and_again_is_the_unbroken_one(tmp_path):
    command = [python(), "scripts/soak.py", "--iterations", "4", "--lifetime", "1.0", "2.0", "--output_dir"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run([*command, tmp_path], capture_output=True, text=True, env=environment, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal, bit for bit" in result.stdout
    figures = json.loads(result.stdout[: result.stdout.index("}", result.stdout.index("handles_last")) + 1])
    assert figures["iterations"] == 4 and figures["kills"] >= 1 and figures["ended"]["0"] == 1


def test_memory_that_grows_is_measured():
    samples = [[k, 1000 + 70 * k, 9 + (k > 30)] for k in range(1, 51)]
    grown = soak.growth(samples)
    assert grown["memory_slope_kib"] == pytest.approx(70)
    assert grown["handles_last"] == grown["handles_first"] + 1


def test_a_life_is_ended_by_the_signal_or_by_itself():
    for code, expected in ((0, 0), (None, -signal.SIGKILL)):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)" if code is None else "pass"])
        assert soak.end_after(process.pid, 1.0 if code is None else 60.0, signal.SIGKILL) == expected
        process.returncode = 0  # it was waited for


def test_what_differs_is_named(tmp_path):
    for name, reward in (("a", 1.0), ("b", 2.0)):
        last = tmp_path / name / "run" / "checkpoints" / "000001"
        last.mkdir(parents=True)
        (last / "state.json").write_text(json.dumps({"update": 1, "settings": name}))
        (last / "manifest.json").write_text("{}")
        line = {"iteration": 1, "reward/mean": reward, "time/iteration": random.random()}
        (tmp_path / name / "run" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert soak.compare(tmp_path / "a", tmp_path / "b", 1) == ["metrics"]
    assert soak.compare(tmp_path / "a", tmp_path / "a", 1) == []
