"""GPUs that torch cannot use, and versions of cuDNN without 3D convolutions."""

from contextlib import ExitStack

import pytest
import torch

import post_train
from hyvideo.loading.gpu_driver import check_allocator, cudnn_problem, driver_problem
from hyvideo.loading.model_setup import choose_device
from hyvideo.loading.requirements import gpu_problem
from hyvideo.settings import processes
from hyvideo.settings.command_line import parse


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A function that puts an nvidia-smi for 8 GPUs with this driver on PATH."""

    def install(version):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nfor i in 0 1 2 3 4 5 6 7; do echo {version}; done\n")
        program.chmod(0o755)

    monkeypatch.setattr(processes, "may_have_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


def test_a_driver_that_is_too_old_is_an_error_with_both_versions_and_the_fix(driver):
    driver("550.54.15")
    with pytest.raises(
        ValueError, match="driver 550.54.15 and torch .* for CUDA 13.0. Install driver 580 or newer"
    ):
        choose_device("auto")
    assert gpu_problem("auto", 8) == driver_problem() and gpu_problem("cpu", 8) is None
    assert choose_device("cpu").type == "cpu"


def test_hidden_gpus_are_not_used(driver, monkeypatch):
    driver("550.54.15")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert choose_device("auto").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert driver_problem()


def test_a_machine_without_gpus_uses_the_cpu(driver, tmp_path):
    assert choose_device("auto").type == "cpu"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")  # the driver is not loaded
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert driver_problem() is None


def test_the_run_exits_with_2_before_it_loads_anything(driver, tmp_path, capsys):
    driver("535.104.05")
    out = tmp_path / "out"
    command = parse(
        ["--config", "configs/smoke.yaml", "--output_dir", str(out), "--device", "auto"]
    )
    with ExitStack() as at_end:
        assert post_train.run(command, at_end) == 2
    assert "driver 535.104.05" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize("version, is_named", [(90800, 1), (91499, 1), (91500, 0)])
def test_versions_of_cudnn_without_3d_convolutions_are_named_with_the_fix(
    monkeypatch, version, is_named
):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert ("pip install 'nvidia-cudnn-cu12>=9.15'" in (cudnn_problem() or "")) == is_named


@pytest.fixture
def allocate(monkeypatch):
    """A function that lets every allocation on a GPU fail with this message, with this variable of
    the allocator.
    """

    def fail_with(message, name="PYTORCH_ALLOC_CONF", value="expandable_segments:True"):
        def empty(*size, device, **options):
            assert device.type == "cuda" and current == [device]
            raise RuntimeError(message)

        current = []
        for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(torch, "empty", empty)

    return fail_with


def test_a_gpu_without_expandable_segments_is_an_error_that_names_the_variable(allocate):
    allocate("CUDA driver error: device not ready\nframe 0")
    message = (
        "cuda:1 in expandable segments, got 'CUDA driver error: device not ready'; .* Set "
        "PYTORCH_ALLOC_CONF=expandable_seg"
    )
    with pytest.raises(ValueError, match=message):
        check_allocator(torch.device("cuda", 1))
    check_allocator(torch.device("cpu"))
