"""A check that fails, hangs or dies is reported, later checks still run, and results are written
after each.
"""

import json
import os

import pytest

from tests.conftest import ROOT
from tests.isolated_checks import Check, Number, run_checks

NUMBERS = [
    Number(
        "speed of a product",
        "good",
        "test_good",
        "TFLOP/s",
        "at least 700",
        700,
        1e9,
        "look at the clock",
    ),
    Number(
        "half of it", "slow", "test_slow", "TFLOP/s", "at least 400", 400, 1e9, "look at the clock"
    ),
]

TESTS = """
import os, subprocess, sys, time
import pytest

def test_good(record_property):
    print("output")
    record_property("TFLOP/s", 790.123456)
    record_property("kernel", "a | b")

def test_bad(record_property):
    record_property("difference", 0.1)
    raise ValueError("must be positive, got -1")

@pytest.fixture
def broken():
    raise ValueError("setup failed")

def test_broken(broken):
    pass

def test_before():
    pass

def test_dies():
    os.kill(os.getpid(), 9)

def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open("child", "w").write(str(child.pid))
    time.sleep(60)

def test_slow(request):
    from tests import isolated_checks
    isolated_checks.record(request.node.name, "TFLOP/s", 395.0)
    time.sleep(60)

def test_environment():
    assert os.environ["CHECK_VARIABLE"] == "1"
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "test_it.py").write_text(TESTS)

    def run(checks, seconds=60, on_row=lambda check, row: None):
        checks = {
            name: Check([f"test_it.py::test_{test}" for test in tests], 1, *others)
            for name, (tests, *others) in checks.items()
        }
        is_good = run_checks(
            checks,
            tmp_path,
            tmp_path / "work",
            seconds=seconds,
            title="a title",
            numbers=NUMBERS,
            on_row=on_row,
        )
        results = json.loads((tmp_path / "gpu.json").read_text())
        return (
            is_good,
            {result["check"]: result for result in results},
            (tmp_path / "gpu.md").read_text(),
        )

    return run


@pytest.mark.system
def test_a_check_that_fails_hangs_or_dies_is_reported_and_the_others_run(run, tmp_path):
    checks = {
        "dies": (["before", "dies"], 20),
        "hangs": (["before", "hangs"], 4),
        "bad": (["bad", "good", "broken"], 20),
    }
    checks |= {
        "unknown": (["unknown"], 20),
        "good": (["good", "environment"], 20, [], {"CHECK_VARIABLE": "1"}),
    }
    is_good, results, table = run(checks)
    assert not is_good
    assert [result["ok"] for result in results.values()] == [False] * 4 + [True]
    reasons = [result["reason"] for result in results.values()]
    message = "exit code 1: ValueError: must be positive, got -1"
    assert reasons == ["signal 9", "not finished within 4 s", message, "exit code 4", None]
    for name in ("dies", "hangs"):
        assert [(row["what"], row["ok"]) for row in results[name]["rows"]] == [
            ("test_before", True)
        ]
    assert [(row["what"], row["ok"]) for row in results["bad"]["rows"]] == [
        ("test_bad", False),
        ("test_good", True),
        ("test_broken", False),
    ]
    assert (
        "| dies | **no** | signal 9 |  |" in table
        and "| bad | **no** | test_bad | difference 0.1, seconds" in table
    )
    assert "ValueError: must be positive, got -1" in (tmp_path / "gpu.log").read_text()
    assert (
        "| good | yes | test_good | TFLOP/s 790.1, kernel a / b, seconds" in table
        and "# a title" in table
    )
    child = int((tmp_path / "child").read_text())  # processes that a check started end with it
    assert (
        not os.path.exists(f"/proc/{child}")
        or "Z" in open(f"/proc/{child}/stat").read().split(")")[1].split()[0]
    )
