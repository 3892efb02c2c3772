"""Small runs for the tests: the settings of configs/smoke.yaml, smaller still."""

import sys
from pathlib import Path

import pytest
import torch

from hyvideo.config.settings import Config, load_config
from hyvideo.distributed.mesh import Mesh
from tests import forked

ROOT = Path(__file__).parent.parent


def pytest_configure():
    forked.announce()


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow too")


def pytest_collection_modifyitems(config, items):
    """Further cases of what is tested already, at half a minute and more each."""
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow; --slow runs it"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def forked_programs(monkeypatch):
    """What the product starts as ``sys.executable`` need not import torch again."""
    monkeypatch.setattr(sys, "executable", forked.python())


@pytest.fixture
def mesh() -> Mesh:
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
    )
