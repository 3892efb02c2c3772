"""Loading code of the user, and the thread that calls it."""

import sys
import threading
import time

import pytest
import torch

from hyvideo.files.custom_code import Worker, code_files, load_object

CODE = """
from dataclasses import dataclass
import torch
torch.set_default_dtype(torch.float64)

@dataclass
class Mine:
    x: "float" = 1.0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine_of_user.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_file_is_loaded_once_and_changes_nothing(folder):
    found = load_object("mine_of_user.py:Mine", "reward_model")
    assert found().x == 1.0 and torch.get_default_dtype() == torch.float32
    assert load_object(f"{folder}/mine_of_user.py:Mine", "objective") is found
    assert load_object("mine_of_user:Mine", "reward_model") is not found  # another module
    with pytest.raises(ValueError, match="mine_of_user.py:Min"):
        load_object("mine_of_user.py:Min", "reward_model")


@pytest.mark.parametrize("code", ["1 / 0", "exit(0)"])
def test_a_file_that_fails_is_named_and_can_be_corrected(folder, code):
    (folder / "broken.py").write_text(code)
    with pytest.raises(ValueError, match="sde_type 'broken.py'"):
        load_object("broken.py:f", "sde_type")
    assert str(folder / "broken.py") not in sys.modules
    # of another length, or Python takes its compiled code for that of the file before
    (folder / "broken.py").write_text("f = 3  # corrected")
    assert load_object("broken.py:f", "sde_type") == 3


def test_the_files_of_custom_code_are_those_that_settings_name(folder):
    places = ["videoalign", "mine_of_user.py:Mine", "mine_of_user:Mine", "mine_of_user.py:Other"]
    names = [path.name for path in code_files(places)]
    assert names == ["mine_of_user.py"] * 2  # relative, and absolute


def test_jobs_run_in_order_and_raise_their_own_errors():
    worker = Worker()
    done = []
    futures = [worker.submit(lambda n=number: done.append(n)) for number in range(3)]
    failed = worker.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(10)
    worker.close(None)
    assert done == [0, 1, 2] and all(future.done() for future in futures)


def test_a_job_that_hangs_does_not_keep_the_end_waiting():
    worker, released = Worker(), threading.Event()
    worker.submit(lambda: released.wait(30))
    start = time.monotonic()
    worker.close(0.1)
    assert time.monotonic() - start < 5
    released.set()
