"""A check that fails, hangs or dies is told, the next goes on, and what is known is written after each."""

import json
import os

import pytest

from tests.conftest import ROOT
from tests.isolated_checks import Check, run_checks

TESTS = """
import os, subprocess, sys, time
import pytest

def test_good(record_property):
    print("what it says")
    record_property("TFLOP/s", 790.123456)
    record_property("kernel", "a | b")

def test_bad(record_property):
    record_property("apart", 0.1)
    raise ValueError("the rule, what was got")

@pytest.fixture
def broken():
    raise ValueError("never begins")

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

def test_environment():
    assert os.environ["OF_THE_CHECK"] == "1"
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "test_it.py").write_text(TESTS)

    def run(checks, seconds=60, on_row=lambda check, row: None):
        checks = {
            name: Check([f"test_it.py::test_{test}" for test in tests], *others)
            for name, (tests, *others) in checks.items()
        }
        is_good = run_checks(checks, tmp_path, seconds=seconds, title="a title", on_row=on_row)
        results = json.loads((tmp_path / "gpu.json").read_text())
        return is_good, {result["check"]: result for result in results}, (tmp_path / "gpu.md").read_text()

    return run


def test_a_check_that_fails_hangs_or_dies_is_told_and_the_rest_goes_on(run, tmp_path):
    checks = {
        "dies": (["before", "dies"], 20),
        "hangs": (["before", "hangs"], 4),
        "bad": (["bad", "good", "broken"], 20),
    }
    checks |= {"unknown": (["unknown"], 20), "good": (["good", "environment"], 20, {"OF_THE_CHECK": "1"})}
    is_good, results, table = run(checks)
    assert not is_good
    assert [result["ok"] for result in results.values()] == [False] * 4 + [True]
    reasons = [result["reason"] for result in results.values()]
    told = "exit code 1: ValueError: the rule, what was got"
    assert reasons == ["signal 9", "no end within 4 s", told, "exit code 4", None]
    for name in ("dies", "hangs"):
        assert [(row["what"], row["ok"]) for row in results[name]["rows"]] == [("test_before", True)]
    assert [(row["what"], row["ok"]) for row in results["bad"]["rows"]] == [
        ("test_bad", False),
        ("test_good", True),
        ("test_broken", False),
    ]
    assert "| dies | **no** | signal 9 |  |" in table and "| bad | **no** | test_bad | apart 0.1, seconds" in table
    assert "ValueError: the rule, what was got" in (tmp_path / "bad.log").read_text()
    assert "| good | yes | test_good | TFLOP/s 790.1, kernel a / b, seconds" in table and "# a title" in table
    child = int((tmp_path / "child").read_text())  # what a check has started ends with it
    assert not os.path.exists(f"/proc/{child}") or "Z" in open(f"/proc/{child}/stat").read().split(")")[1].split()[0]


def test_results_are_there_after_each_check_and_those_that_come_too_late_get_no_time(run, tmp_path):
    seen = []

    def on_row(check, row):
        path = tmp_path / "gpu.json"
        seen.append((check, row["what"], len(json.loads(path.read_text())) if path.exists() else 0))

    is_good, *_ = run({"first": (["hangs"], 60), "second": (["good"], 60)}, 0.3, on_row)
    assert not is_good
    assert seen == [("first", "no end within 0.3 s", 0), ("second", "no time was left", 1)]
