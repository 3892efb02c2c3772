"""Videos of several policies: parsing of policies, and equal noise and prompts for all of them."""

import json

import pytest
import torch
from PIL import Image

from hyvideo.checkpoints.format import DIGESTS
from hyvideo.data.videos import read_video
from hyvideo.generation.generation import Source
from hyvideo.loading.model_setup import RANDOM_WEIGHTS_SEED
from hyvideo.models.loading import load_transformer
from hyvideo.models.lora import LoraPair
from hyvideo.models.lora_saving import save_lora
from hyvideo.settings.config import Config
from studies.figures.named_policies import read_policies
from tests.distributed.launch import start

COMMON = ["--config", "configs/smoke.yaml", "--validation_steps", "1", "--cfg_scale", "1"]


@pytest.fixture
def run_folder(tmp_path):
    for iteration in ("000010", "000020"):
        folder = tmp_path / "run/checkpoints" / iteration
        folder.mkdir(parents=True)
        (folder / DIGESTS).write_text("{}")
    return tmp_path / "run"


def sampling(guidance_scale=1.0):
    return Config().with_settings(cfg_scale=guidance_scale).resolved().sampling


def test_a_policy_is_the_base_a_run_a_checkpoint_or_a_lora(tmp_path, run_folder):
    save_lora({"module": LoraPair(torch.ones(1, 2), torch.ones(2, 1), 1.0)}, tmp_path / "lora")
    (lora_file,) = (tmp_path / "lora").glob("*.safetensors")
    first = run_folder / "checkpoints/000010"
    words = [
        "base",
        f"run={run_folder}",
        f"first={first}",
        f"lora={tmp_path / 'lora'}",
        f"file={lora_file}",
    ]
    found = read_policies([*words, "base@6", f"run={run_folder}@2.5"], sampling(4.0))
    assert {
        name: (source, sampling.guidance_scale) for name, (source, sampling) in found.items()
    } == {
        "base": (Source(), 4.0),
        "run": (Source(run_folder / "checkpoints/000020"), 4.0),
        "first": (Source(first), 4.0),
        "lora": (Source(lora=tmp_path / "lora"), 4.0),
        "file": (Source(lora=lora_file), 4.0),
        "base@6": (Source(), 6.0),
        "run@2.5": (Source(run_folder / "checkpoints/000020"), 2.5),
    }
    steps = read_policies(["base@4steps", "base@3@2steps"], sampling(4.0))
    assert {name: (of.guidance_scale, of.steps) for name, (_, of) in steps.items()} == {
        "base@4steps": (4.0, 4),
        "base@3@2steps": (3.0, 2),
    }


@pytest.mark.slow
def test_two_processes_generate_all_policies_from_the_same_noise(tmp_path, tiny_config):
    """The process with fewer videos waits for the other one for longer than
    `timeout`.
    """
    transformer = load_transformer(
        "assets/miniature", "miniature", random_weights_seed=RANDOM_WEIGHTS_SEED
    )
    transformer.save_pretrained(tmp_path / "copy")
    with torch.no_grad():
        transformer.proj_out.weight.mul_(0.5)
    transformer.save_pretrained(tmp_path / "other")
    words = [f"copy={tmp_path / 'copy'}", f"other={tmp_path / 'other'}", "base", "base@2", "base@0"]
    out = tmp_path / "out"
    command = [
        "-m",
        "scripts.compare_policies",
        *COMMON,
        "--output_dir",
        out,
        "--num_prompts",
        3,
        "--policies",
        *words,
    ]
    ends = start(2, *command, "--timeout", 0.05)
    assert [end.exception() for end in ends] == [None, None]
    for number in range(3):
        copy, other, base = (
            read_video(out / name / f"{number:04d}.mp4")[0] for name in ("copy", "other", "base")
        )
        assert torch.equal(copy, base) and not torch.equal(other, base)
    records = {
        name: json.loads((out / name / "0000.json").read_text())
        for name in ("base", "base@2", "base@0")
    }
    assert [record["guidance_scale"] for record in records.values()] == [1.0, 2.0, 0.0]
    assert Image.open(out / "policies.png").width > 3 * 5 * 96
    with Image.open(out / "policies.webp") as moving:
        assert moving.n_frames > 1 and moving.width > 5 * 128
