"""Small runs for the tests: the settings of configs/smoke.yaml, smaller still."""

import gc
import os
import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from hyvideo.config.command_line import load_config
from hyvideo.config.settings import Config
from tests import forked, refusals

ROOT = Path(__file__).parent.parent

# What takes longest is begun first, so that no worker ends with it alone.
LONGEST = (
    "distributed/test_same_run.py",
    "distributed/test_sequence_parallel.py",
    "test_trainer.py",
    "training/test_faults.py",
    "miniature/test_build.py",
)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow too")


def pytest_configure(config):
    forked.announce()
    refusals.has_time = config.getoption("--slow")
    if config.getoption("numprocesses", None):  # this process runs no test
        config.option.tx = [f"popen//python={forked.python()}"] * len(config.option.tx)
    else:
        forked.remember_drawn_weights()


def pytest_collection_modifyitems(config, items):
    """Orders files by the time they take, and leaves out further cases of what is tested already."""
    items.sort(key=lambda item: not str(item.path).endswith(LONGEST))
    on_gpu = [item for item in items if "cuda" in item.keywords]
    if on_gpu and not _can_check_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; CHECK_DEVICE=cpu tries it on the CPU"))
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow; --slow runs it"))


def _can_check_gpu() -> bool:
    import torch

    return os.environ.get("CHECK_DEVICE") == "cpu" or torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is imported by now is no garbage


@pytest.fixture
def forked_programs(monkeypatch):
    """What the product starts as ``sys.executable`` need not import torch again."""
    monkeypatch.setattr(sys, "executable", forked.python())


@pytest.fixture
def mesh():
    from hyvideo.distributed.mesh import Mesh

    return Mesh(rank=0, world_size=1, sp_size=1)


@pytest.fixture
def tiny_config(tmp_path, monkeypatch) -> Config:
    """One update per round, one branch, no validation; 8 rollouts of 5 frames of 16 x 16."""
    monkeypatch.chdir(ROOT)
    return load_config(
        "configs/smoke.yaml",
        output_dir=str(tmp_path / "run"),
        valid_video_csv="",
        cfg_scale=1.0,
        num_updates_per_rollout=1,
        mini_batch_size_per_update=8,
        report_to=["none"],
        log_video_interval=0,
        report=False,
    )


@pytest.fixture
def files_of_at_most():
    """A context in which this process can write so many bytes of a file, as on a disk that is full then."""

    @contextmanager
    def limited(size):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def exit_code(monkeypatch):
    """Runs the ``main`` of a program with the words of a command line, and gives its exit code."""

    def run(main, *words):
        monkeypatch.setattr("sys.argv", [f"{main.__module__.rpartition('.')[2]}.py", *map(str, words)])
        try:
            return main() or 0
        except SystemExit as ended:
            return ended.code

    return run
