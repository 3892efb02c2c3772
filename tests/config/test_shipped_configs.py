"""Shipped configs: legal on the number of GPUs that they name, within their memory, and with the paper's settings."""

import re
from pathlib import Path

import pytest

import post_train
from hyvideo.config.command_line import parse
from hyvideo.config.memory.advice import fastest_change
from hyvideo.config.memory.hardware import Hardware
from hyvideo.config.memory.phases import memory
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.rules import check
from hyvideo.config.run_plan import make_plan
from hyvideo.config.settings import Config
from hyvideo.models.hunyuan_video15.sizes import Architecture
from hyvideo.models.sizes import read_architecture

ROOT = Path(__file__).parents[2]
LARGE = sorted((ROOT / "configs").rglob("hunyuanvideo15*.yaml")) + sorted((ROOT / "configs" / "paper").glob("*.yaml"))
PAPER = [path for path in LARGE if path.parent.name == "paper"]


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def first_line(path: Path) -> str:
    return path.read_text().splitlines()[0]


def num_gpus(path: Path) -> int:
    """Return the number of GPUs in the first line of a file."""
    return 1 if "one GPU" in first_line(path) else int(re.search(r"(\d+) GPUs", first_line(path))[1])


def gpu_memory(path: Path) -> float:
    """Return the GB of a GPU in the first line of a file, by default 80."""
    found = re.search(r"(\d+) GB", first_line(path))
    return float(found[1]) if found else 80.0


def config_of(path: Path) -> Config:
    return parse(["--config", str(path)]).config


@named(LARGE)
def test_a_large_config_is_printed_with_its_length_and_fits_its_gpus(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", str(num_gpus(path)))
    flags = ["--config", str(path), "--pretrained_model_root", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["post_train.py", *flags, "--print_config"])
    code, printed = post_train.main(), capsys.readouterr().out
    assert code == 0, printed
    assert re.search(rf"on {num_gpus(path)} GPUs?, .* GPU-hours", printed)
    assert ("longer than a week" in printed) == (config_of(path).optimizer.max_steps == 10_000)
    hardware = Hardware(gpu_memory=gpu_memory(path))
    run = PlannedRun(config_of(path), num_gpus(path), Architecture(), hardware=hardware)
    assert memory(run).fits(hardware.gpu_memory)


@named(LARGE)
@pytest.mark.parametrize("network", [50.0, 3.0])
def test_a_large_config_is_the_fastest_on_fast_and_slow_networks(path, network):
    hardware = Hardware(network=network, gpu_memory=gpu_memory(path))
    run = PlannedRun(config_of(path), num_gpus(path), Architecture(), hardware=hardware)
    assert fastest_change(run) == {}


def test_both_settings_of_the_paper_have_configs_for_8_and_64_gpus():
    assert [path.stem for path in PAPER] == [f"table2_{x}_{n}gpu" for x in "ab" for n in (64, 8)]


@named(PAPER)
def test_a_paper_config_has_the_batches_and_updates_of_the_paper(path):
    config, gpus = config_of(path), num_gpus(path)
    plan = make_plan(config, gpus)
    assert (plan.replicas, plan.rollouts, plan.groups) == {8: (8, 32, 8), 64: (64, 256, 64)}[gpus]
    assert f"{plan.groups} prompts, {plan.rollouts} rollouts" in path.read_text().splitlines()[0]
    assert config.num_updates == 100 and plan.num_trained_steps == 20
    assert config.kl_strategy == "dual_moving"


@named(PAPER)
def test_a_paper_config_has_the_settings_of_the_paper(path):
    config, setting = config_of(path), path.stem[7]
    weights = {"a": (1.0, 1.0, 1.0), "b": (0.5, 0.5, 1.0)}[setting]
    assert config.reward_weights == dict(zip(("VQ", "MQ", "TA"), weights))
    assert config.record.output_dir == f"outputs/paper/{path.stem}"
    values = config.flat()
    constants = {
        "sample_n_frames": 81, "height": 352, "width": 624, "fps": 24, "grpo_sampling_steps": 20, "shift": 5,
        "cfg_scale": 6, "eta": 0.5, "sde_type": "sage_grpo", "last_step": "stochastic", "clip_range": 1e-4,
        "learning_rate": 1e-5, "weight_decay": 0.01, "max_grad_norm": 1, "use_muon": True, "kl_weight": 1e-5,
        "kl_coef": 1e-7, "kl_min_coef": 1e-7, "update_ref_model_step": 10, "validation_interval": 10,
        "validation_steps": 40, "validation_num_frames": 121, "validation_shift": 5, "validation_height": 480,
        "validation_width": 864, "validation_seed": 930, "validate_at_step0": True,
    }  # fmt: skip
    assert {name: values[name] for name in constants} == constants


def test_paper_configs_differ_only_in_reward_sharding_and_folder():
    def differing(path: Path, other: Path) -> set[str]:
        first, second = config_of(path).flat(), config_of(other).flat()
        return {name for name in first if first[name] != second[name]} - {"output_dir"}

    a64, a8, b64, b8 = PAPER
    assert differing(a8, b8) == differing(a64, b64) == {"reward_weights"}
    assert differing(a8, a64) == {"dp_replicate"}


@pytest.mark.parametrize("name, world_size, gpu_memory", [("wan21_1gpu_nft", 1, 24.0), ("wan21_8gpu_nft", 8, 80.0)])
def test_a_wan_config_is_legal_and_fits_its_gpus(name, world_size, gpu_memory, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = ROOT / "configs" / f"{name}.yaml"
    assert re.search(f"{gpu_memory:g} GB|{world_size} GPUs", path.read_text().splitlines()[0])
    config = config_of(path)
    assert config.model.transformer_version in config.model.pretrained_model_root  # where download_weights.sh puts it
    architecture = read_architecture("nowhere", config.model.transformer_version)
    run = PlannedRun(config, world_size, architecture, hardware=Hardware(gpu_memory=gpu_memory))
    check(config, world_size, on_this_machine=False)
    assert not run.problems and memory(run).fits(gpu_memory)
