"""Fixtures of the tests marked cuda: the device and the measured model, tiny on a CPU or with
CHECK_TINY.
"""

import gc
import os

import pytest
import torch

from hyvideo.loading.model_setup import make_deterministic
from hyvideo.models.attention_kernels import Shape, choose_kernel
from tests.cuda import rows
from tests.cuda.speed import Workload
from tests.cuda.workload import DEVICE, IS_TINY, TINY_MODEL


@pytest.fixture(scope="session")
def gpu():
    if "CHECK_DETERMINISTIC" in os.environ:
        make_deterministic()
    torch.backends.cudnn.allow_tf32 = False  # with TF32, a float32 convolution has an error of 1e-3
    choose_kernel("auto", Shape(), DEVICE)
    return DEVICE


@pytest.fixture(autouse=True)
def graphs_of_one_test():
    """Forget compiled graphs after each test: a process may have only a few for a block."""
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def memory_of_one_module():
    """Give memory of the GPU back to the other lanes, and to the programs that later tests start."""
    yield
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def work(gpu):
    """The released model with random weights, and the size of the recipes: 81 frames of
    352 x 624.
    """
    return (
        Workload(gpu, sizes=TINY_MODEL, grid=(2, 4, 4), text_tokens=8) if IS_TINY else Workload(gpu)
    )


@pytest.fixture
def record(record_property, request):
    """A function that records a dictionary of values.

    They are written at once, also if the test is killed later.
    """

    def record(values):
        for name, value in values.items():
            record_property(name, value)
            rows.record(rows.name_of(request.node.nodeid), name, value)

    return record
