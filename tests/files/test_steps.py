"""Commands that a program of several steps runs: what Ctrl-C in a terminal and signals do to them."""

import os
import signal
import subprocess
import sys

import pytest

from tests.forked import ROOT

STEP = """
import signal, sys, time
for name in ("SIGINT", "SIGTERM"):
    def end(number, frame, name=name):
        print("the step got", name, flush=True)
        if name == sys.argv[1]:
            sys.exit(75)
    signal.signal(getattr(signal, name), end)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""
PROGRAM = """
import sys
from hyvideo.files.cli import exit_on_interrupt
from hyvideo.files.steps import run
with exit_on_interrupt("program.py"):
    run([sys.executable, "-c", *sys.argv[1:]])
"""


@pytest.fixture
def program():
    """Starts a program with a step that ends on this signal, in a process group of its own."""
    started = []

    def start(ends_on):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, STEP, ends_on],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_ctrl_c_ends_the_step_by_sigterm_and_prints_one_line(program):
    process = program("SIGTERM")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output == "the step got SIGTERM\n"
    assert error.strip() == "program.py: interrupted; the same command continues"


def test_a_second_ctrl_c_kills_a_step_that_does_not_end(program):
    process = program("never")
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "the step got SIGTERM\n"
    os.killpg(process.pid, signal.SIGINT)
    output, error = process.communicate(timeout=60)  # ends, because the step no longer writes
    assert process.returncode == 130 and not output
    assert "Traceback" not in error
