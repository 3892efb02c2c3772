"""Messages about files, packages and GPUs that a machine lacks for a run; they are not errors."""

import shutil

import pytest
import torch

from hyvideo.checks.rules import check
from hyvideo.loading import machine
from hyvideo.loading.machine import resolve_auto
from hyvideo.loading.requirements import gpu_problem, missing_requirements
from hyvideo.settings import processes
from hyvideo.settings.command_line import load_config
from hyvideo.settings.run_inputs import RunInputs


def test_missing_files_are_named(tiny_config, tmp_path, monkeypatch):
    root = tmp_path / "ckpts"
    shutil.copytree("assets/miniature", root)
    shutil.rmtree(root / "vae")
    shutil.rmtree(root / "VideoReward")
    changes = {
        "pretrained_model_root": str(root),
        "valid_video_csv": "nowhere.csv",
        "reward_model": "videoalign",
    }
    config = tiny_config.with_settings(**changes, base_weight_dtype="fp8", lora_rank=2)
    monkeypatch.setattr(
        "hyvideo.checks.machine_rules.is_installed", lambda package: package != "torchao"
    )
    messages = list(missing_requirements(RunInputs(config)))
    expected = [
        "torchao",
        "file not found: nowhere.csv",
        "cannot be used",
        "vae",
        "of reward_model videoalign in",
    ]
    for words in expected:
        assert sum(words in message for message in messages) == 1, (words, messages)
    with pytest.raises(ValueError, match="file not found: nowhere.csv"):
        check(config)


def test_errors_in_the_settings_do_not_depend_on_the_machine(tiny_config, tmp_path):
    (tmp_path / "prompts.csv").write_text("name\na cat\n")
    with pytest.raises(ValueError, match="prompt"):
        check(
            tiny_config.with_settings(prompts_csv=str(tmp_path / "prompts.csv")),
            on_this_machine=False,
        )
    config = tiny_config.with_settings(prompts_csv="nowhere.csv", pretrained_model_root="nowhere")
    check(config, on_this_machine=False)


def test_activation_checkpointing_is_the_fastest_that_fits_the_gpu(mesh, monkeypatch, tmp_path):
    config = load_config(
        "configs/hunyuanvideo15_480p_8gpu.yaml", pretrained_model_root=str(tmp_path)
    )
    config = config.with_settings(sp_size=1, batch_size=4, lora_rank=32)

    def chosen(config, device, gib=80.0):
        monkeypatch.setattr(machine, "gpu_memory", lambda device: gib)
        return resolve_auto(config, mesh, torch.device(device)).distributed.activation_checkpointing

    found = [chosen(config, "cuda", gib) for gib in (500.0, 80.0, 30.0)]
    assert found == ["none", "selective", "full"]
    assert (
        chosen(config, "cpu")
        == "full"
        == chosen(config.with_settings(activation_checkpointing="full"), "cuda")
    )
    # The unknown version is rejected later, when the transformer is read.
    assert chosen(config.with_settings(transformer_version="mine"), "cuda") == "full"


@pytest.mark.parametrize(
    "program, header, missing",
    [
        ("cc", True, None),
        ("", True, "needs a C compiler .install gcc.*; or set enable_compile false"),
        ("cc", False, "needs .*/Python.h .install python3-dev.; or set enable_compile false"),
    ],
)
def test_compilation_needs_a_compiler_and_the_headers_of_python(
    mesh, monkeypatch, tmp_path, program, header, missing
):
    config = load_config(
        "configs/hunyuanvideo15_480p_8gpu.yaml", pretrained_model_root=str(tmp_path)
    )
    monkeypatch.setattr(machine, "gpu_memory", lambda device: 80.0)
    monkeypatch.setattr(shutil, "which", lambda name: program)
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    if header:
        (tmp_path / "Python.h").touch()
    if missing:
        with pytest.raises(ValueError, match=missing):
            resolve_auto(config, mesh, torch.device("cuda"))
        config = config.with_settings(enable_compile="false")
    resolve_auto(config, mesh, torch.device("cuda"))


def test_each_process_of_a_machine_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(processes, "may_have_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert gpu_problem("cpu", 8) is gpu_problem("auto", 4) is None
    assert gpu_problem("cuda", 8) == "each process needs a GPU: needed 8, found 4"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # two machines
    assert gpu_problem("auto", 8) is None
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert (
        gpu_problem("auto", 8)
        == "each process needs a GPU: needed 4, found 0; device auto would use the CPU"
    )
