"""Fixtures of the tests marked cuda: the device and the measured model, tiny on a CPU or with
CHECK_TINY.
"""

import os

import pytest
import torch

from hyvideo.loading.model_setup import make_deterministic
from hyvideo.models.attention_kernels import Shape, choose_kernel
from tests import isolated_checks
from tests.cuda.speed import Workload
from tests.cuda.workload import DEVICE, IS_TINY, TINY_MODEL


@pytest.fixture(scope="session")
def gpu():
    if "CHECK_DETERMINISTIC" in os.environ:
        make_deterministic()
    torch.backends.cudnn.allow_tf32 = False  # with TF32, a float32 convolution has an error of 1e-3
    choose_kernel("auto", Shape(), DEVICE)
    return DEVICE


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
            isolated_checks.record(request.node.name, name, value)

    return record
