"""A check that fails, hangs or dies is a row, the next goes on, and what is known is written after each row."""

import json
import os
import subprocess
import sys
import time
from functools import partial

import pytest

from hyvideo.evaluation.isolated_checks import Check, run_checks


def good():
    print("what it says")
    yield {"what": "a | product", "TFLOP/s": 790.123456}
    yield {"what": "second"}


def bad():
    yield {"what": "compared", "ok": False, "apart": 0.1}


def raises():
    yield {"what": "before"}
    raise ValueError("the rule, what was got")


def dies():
    yield {"what": "before"}
    os.kill(os.getpid(), 9)


def hangs(folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / "child").write_text(str(child.pid))
    yield {"what": "before"}
    time.sleep(60)


@pytest.fixture
def run(tmp_path):
    def run(checks, seconds=60, fork=True, on_row=lambda check, row: None):
        options = {"seconds": seconds, "fork": fork, "title": "a title", "on_row": on_row}
        is_good = run_checks({name: Check(*check) for name, check in checks.items()}, tmp_path, **options)
        results = json.loads((tmp_path / "gpu.json").read_text())
        return is_good, {result["check"]: result for result in results}, (tmp_path / "gpu.md").read_text()

    return run


def test_a_check_that_fails_hangs_or_dies_is_a_row_and_the_rest_goes_on(run, tmp_path):
    checks = {"raises": (raises, 9), "dies": (dies, 9), "hangs": (partial(hangs, tmp_path), 0.5), "bad": (bad, 9)}
    is_good, results, table = run(checks | {"good": (good, 9)})
    assert not is_good
    assert [result["ok"] for result in results.values()] == [False] * 4 + [True]
    reasons = [result["reason"] for result in results.values()]
    told = "exit code 1: ValueError: the rule, what was got"
    assert reasons == [told, "signal 9", "no end within 0.5 s", None, None]
    assert all(results[name]["rows"] == [{"what": "before"}] for name in ("raises", "dies", "hangs"))
    assert f"| raises | **no** | {told} |  |" in table and "| bad | **no** | compared | apart 0.1 |" in table
    assert (tmp_path / "good.log").read_text() == "what it says\n"


def test_what_a_check_has_started_ends_with_it(run, tmp_path):
    run({"hangs": (partial(hangs, tmp_path), 1)})
    child = int((tmp_path / "child").read_text())
    assert not os.path.exists(f"/proc/{child}") or "Z" in open(f"/proc/{child}/stat").read().split(")")[1].split()[0]


def test_the_results_are_there_after_each_row(run, tmp_path):
    seen = []

    def on_row(check, row):
        path = tmp_path / "gpu.json"
        seen.append([len(result["rows"]) for result in json.loads(path.read_text())] if path.exists() else [])

    is_good, results, table = run({"first": (good, 9), "second": (good, 9)}, on_row=on_row)
    assert is_good and seen == [[], [1], [2], [2, 1]]
    assert "# a title" in table and "| first | yes | a / product | TFLOP/s 790.1 |" in table


def test_checks_that_come_too_late_get_no_time(run, tmp_path):
    is_good, results, _ = run({"hangs": (partial(hangs, tmp_path), 60), "good": (good, 60)}, seconds=0.5)
    assert not is_good
    assert [result["reason"] for result in results.values()] == ["no end within 0.5 s", "no time was left"]


def test_a_process_may_be_a_new_one(run):
    is_good, results, _ = run({"good": (good, 60), "raises": (raises, 60)}, fork=False)
    assert results["good"]["ok"] and results["raises"]["reason"].endswith("ValueError: the rule, what was got")
