"""A limit on the memory of a GPU makes it look, and behave, like a smaller one."""

import math
from types import SimpleNamespace

import pytest
import torch

from hyvideo.models.gpu_memory import LIMIT, apply_limit, free_bytes, limit_bytes, total_bytes

GIB = 2**30
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def fractions(monkeypatch):
    """The fractions that a fake GPU with 80 GiB was limited to: 70 GiB are free, 8 GiB reserved, 5
    GiB allocated.
    """
    found = []
    values = {
        "get_device_properties": SimpleNamespace(total_memory=80 * GIB),
        "mem_get_info": (71.5 * GIB, 80 * GIB),
        "memory_reserved": 8 * GIB,
        "memory_allocated": 5 * GIB,
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda value, device: found.append(value)
    )
    return found


def test_without_a_limit_the_whole_gpu_is_used(fractions, monkeypatch):
    monkeypatch.delenv(LIMIT, raising=False)
    apply_limit(GPU)
    assert not fractions and total_bytes(GPU) == 80 * GIB and free_bytes(GPU) == (71.5 + 3) * GIB
    assert total_bytes(CPU) == 0 and free_bytes(CPU) == math.inf


def test_with_a_limit_torch_may_allocate_the_limit_without_the_context(fractions, monkeypatch):
    monkeypatch.setenv(LIMIT, "23.65")
    apply_limit(GPU)
    assert fractions == [pytest.approx((23.65 - 0.5) / 80)]  # 0.5 GiB in use outside of torch
    assert total_bytes(GPU) == pytest.approx(23.65 * GIB)
    assert free_bytes(GPU) == pytest.approx((23.65 - 0.5 - 5) * GIB)
    apply_limit(CPU)
    assert len(fractions) == 1


@pytest.mark.parametrize("text", ["24GB", "0"])
def test_a_limit_that_is_no_positive_number_is_an_error(text, monkeypatch):
    monkeypatch.setenv(LIMIT, text)
    with pytest.raises(ValueError, match=LIMIT):
        limit_bytes()
