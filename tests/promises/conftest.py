"""Runs that several promises start from."""

import shutil

import pytest

from tests.promises.runs import Run


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run of three iterations, with a checkpoint of each."""
    run = Run(tmp_path_factory.mktemp("finished"))
    result = run.start()
    assert result.code == 0, result.output
    return run


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished run that continues up to iteration 4."""
    run = Run(tmp_path, max_steps=4)
    shutil.copytree(finished.out, run.out)
    return run
