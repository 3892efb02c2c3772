"""The device of the tests marked cuda, which are small where it is the CPU."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def gpu():
    torch.backends.cudnn.allow_tf32 = False  # else a convolution in float32 is off by 1e-3
    return torch.device(os.environ.get("CHECK_DEVICE", "cuda"))
