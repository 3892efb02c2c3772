"""Use of the GPUs, with a stand-in for pynvml, which needs a GPU."""

import sys
from types import SimpleNamespace

import pytest

from hyvideo.report.health import GpuHistory


class NVMLError(Exception):
    pass


def no_power(handle):
    raise NVMLError("Not Supported")


def stand_in(**changes):
    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetMemoryInfo": lambda number: SimpleNamespace(
            used=(1 + number) * 2**30, total=24 * 2**30
        ),
        "nvmlDeviceGetName": lambda number: b"RTX 4090",
        "nvmlDeviceGetUtilizationRates": lambda number: SimpleNamespace(gpu=90 + number),
        "nvmlDeviceGetPowerUsage": lambda number: 250_500,
    }
    return SimpleNamespace(**(functions | changes), NVMLError=NVMLError)


def test_memory_use_and_power_of_each_gpu_are_recorded(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", stand_in())
    history = GpuHistory(size=2)
    for _ in range(3):
        history.sample()
    found = history.as_json()
    assert len(found["minutes"]) == 2 and found["minutes"][-1] == 0 and not found["problem"]
    assert [gpu["memory_gib"] for gpu in found["gpus"]] == [[1.0, 1.0], [2.0, 2.0]]
    assert [gpu["utilisation"][0] for gpu in found["gpus"]] == [90.0, 91.0]
    assert (found["gpus"][0]["name"], found["gpus"][0]["total_gib"]) == ("RTX 4090", 24.0)
    assert found["gpus"][0]["watts"] == [250.5, 250.5]


def test_a_gpu_that_does_not_report_its_power_is_recorded_without_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", stand_in(nvmlDeviceGetPowerUsage=no_power))
    history = GpuHistory()
    history.sample()
    assert history.as_json()["gpus"][0]["watts"] == [None]


def fail():
    raise NVMLError("Driver Not Loaded")


@pytest.mark.parametrize(
    "module, problem",
    [
        (None, "pynvml is not installed"),
        (stand_in(nvmlInit=fail), "this machine has no usable NVIDIA GPU: Driver Not Loaded"),
        (stand_in(nvmlDeviceGetCount=fail), "the GPUs cannot be read: Driver Not Loaded"),
    ],
)
def test_a_machine_without_pynvml_or_a_gpu_says_so(monkeypatch, module, problem):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    history = GpuHistory()
    history.sample()
    assert history.as_json()["gpus"] == [] and problem in history.as_json()["problem"]
