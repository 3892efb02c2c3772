"""The run that starts if no flag names a model: its device and folder, and the commands that train
a larger model.
"""

import os
import shlex
from types import SimpleNamespace

import pytest
import torch

from hyvideo.config.command_line import load_config, parse
from hyvideo.config.config import TRAITS
from hyvideo.config.run_plan import make_plan
from scripts import first_run
from scripts.first_run import ON_GPU, Gpus, find_gpus, flags_of_run, main, message, next_commands
from tests.conftest import ROOT

H100 = Gpus(number=8, name="NVIDIA H100 80GB HBM3", gib=79.1)
SMALL = Gpus(number=1, name="NVIDIA GeForce RTX 4090", gib=23.6)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that puts an nvidia-smi for a driver on PATH, and makes torch see that
    many GPUs.
    """

    def install(*, driver="580.65.06", gpus, error=None):
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin" / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nfor i in 0 1 2 3 4 5 6 7; do echo {driver}; done\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        properties = SimpleNamespace(name=H100.name, total_memory=80 * 2**30)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

        def ones(size, device):
            assert device == "cuda"
            if error:
                raise RuntimeError(error)
            return torch.full((size,), 1.0)

        monkeypatch.setattr(torch, "ones", ones)

    return install


def test_gpus_that_torch_can_use_are_found(machine):
    machine(gpus=8)
    assert find_gpus() == Gpus(number=8, name=H100.name, gib=80.0)


def test_a_gpu_with_an_old_driver_or_a_failing_computation_is_not_used_and_the_reason_is_printed(
    machine, monkeypatch, capsys
):
    machine(driver="550.54.15", gpus=0)
    monkeypatch.setattr("sys.argv", ["first_run.py"])
    main()
    printed = capsys.readouterr()
    assert printed.out.split() == [
        "--config",
        "configs/miniature.yaml",
        "--output_dir",
        "outputs/miniature",
    ]
    assert (
        "training the miniature on the CPU: torch cannot use the NVIDIA GPUs of this machine, got "
        "driver 550.54.15" in (printed.err)
    )


def test_a_gpu_on_which_a_computation_fails_is_not_used(machine):
    machine(
        gpus=1,
        error="CUDA error: no kernel image is available for execution on the device\nmore lines",
    )
    gpus = find_gpus()
    assert gpus.number == 0 and "--device" not in flags_of_run([], gpus)
    assert (
        "on the CPU: a computation on GPU 0 failed: CUDA error: no kernel image is available"
        in message([], gpus)
    )


def test_a_machine_without_gpus_trains_on_the_cpu_without_a_problem(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", "")
    assert find_gpus() == Gpus()
    assert (
        message([], Gpus()).splitlines()[0]
        == "run_post_train.sh: training the miniature on the CPU"
    )


def test_on_a_gpu_the_miniature_learns_with_its_own_settings_and_one_batch_in_rollout_and_update(
    monkeypatch,
):
    """Settings of the machine only, and equal shapes, which make the ratios of the first update
    exactly 1.
    """
    monkeypatch.chdir(ROOT)
    assert {TRAITS[name].decides for name in ON_GPU} == {"machine"}
    flags = flags_of_run([], H100)
    config = parse(flags).config
    assert (
        config.model.device == "cuda"
        and config.is_batched
        and config.distributed.enable_compile == "false"
    )
    per_update = make_plan(config).rollouts // config.loss.num_updates_per_rollout
    assert config.rows_per_pass == config.rollout.batch_size == per_update
    changed = {
        name
        for name, value in load_config("configs/miniature.yaml").flat().items()
        if config.flat()[name] != value
    }
    assert changed - {"output_dir"} == {*ON_GPU}
    assert "on the GPU (NVIDIA H100 80GB HBM3); --device cpu trains it on the CPU" in message(
        [], H100
    )


@pytest.mark.parametrize("device", [["--device", "cpu"], ["--device=cuda"]])
def test_a_device_of_the_user_is_kept(device):
    flags = flags_of_run(device, H100)
    assert flags == ["--config", "configs/miniature.yaml", "--output_dir", "outputs/miniature"]
    assert message(device, H100).splitlines()[0] == "run_post_train.sh: training the miniature"


HUNYUAN = "hunyuanvideo15"


@pytest.mark.parametrize(
    "gpus, weights, config, world_size",
    [
        (Gpus(), "", "wan21_1gpu_nft", 1),
        (SMALL, "", "wan21_1gpu_nft", 1),
        (H100, "", f"{HUNYUAN}_480p_8gpu", 8),
        (Gpus(), "transformer/480p_t2v_distilled", f"{HUNYUAN}_1gpu", 1),
        (SMALL, "transformer/480p_t2v_distilled", f"{HUNYUAN}_1gpu_24gb", 1),
        (Gpus(number=4, gib=79.1), "transformer/480p_t2v_distilled", f"{HUNYUAN}_1gpu", 1),
        (H100, "transformer/480p_t2v", f"{HUNYUAN}_480p_8gpu", 8),
        (H100, "wan2.1_t2v_1.3b", "wan21_8gpu_nft", 8),
    ],
)
def test_the_next_commands_fit_the_weights_and_the_gpus(
    gpus, weights, config, world_size, tmp_path
):
    if weights:
        (tmp_path / "ckpts" / weights).mkdir(parents=True)
    commands = [shlex.split(command, comments=True) for command in next_commands(gpus)]
    downloads = [command for command in commands[:-3] if "download_weights.sh" in command]
    assert len(downloads) == (0 if weights else 1)
    for command in commands[-3:]:
        assert command[command.index("--config") + 1] == f"configs/{config}.yaml"
        assert (ROOT / "configs" / f"{config}.yaml").is_file()
    plan, pilot, train = commands[-3:]
    assert "scripts.plan" in plan and "run_post_train.sh" in train
    assert plan[plan.index("--world_size") + 1] == str(world_size)
    assert pilot == [*train, "--pilot"]
    if gpus.number > world_size:
        assert train[0] == f"NPROC={world_size}"


def test_the_version_of_the_recipe_is_downloaded_if_only_another_version_is_there(tmp_path):
    (tmp_path / "ckpts/transformer/480p_t2v").mkdir(parents=True)
    (download,) = [command for command in next_commands(SMALL) if "download_weights.sh" in command]
    assert "--version 480p_t2v_distilled " in download


def test_the_recipes_train_the_versions_that_are_downloaded(monkeypatch):
    monkeypatch.chdir(ROOT)
    for model in first_run.MODELS:
        for row in model["recipes"]:
            assert load_config(row["config"]).model.transformer_version == row["version"]
            fitting = Gpus(number=row["gpus"], gib=row["gib"] + 1)
            assert first_run.recipe(model, fitting) == row


def test_the_plan_gets_the_name_and_the_memory_of_the_gpu():
    (plan,) = [command for command in next_commands(SMALL) if "scripts.plan" in command]
    assert plan.endswith("--gpu 'NVIDIA GeForce RTX 4090' --gpu_memory 23.6")
    unknown = Gpus(number=1, name="another GPU", gib=23.6)
    assert next_commands(unknown)[-3].endswith("--gpu_memory 23.6")


def test_the_help_is_printed_without_a_message(monkeypatch, capsys):
    monkeypatch.setattr(first_run, "find_gpus", Gpus)
    monkeypatch.setattr("sys.argv", ["first_run.py", "--help"])
    main()
    assert capsys.readouterr().err == ""
