"""The build makes a folder that loads, the same one every time; and the shipped one is small and complete."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hyvideo.data.prompts import Request
from hyvideo.miniature import build
from hyvideo.miniature.architecture import VERSION
from hyvideo.models.fit_checks import check_checkpoint
from hyvideo.models.loading import load_transformer

SHIPPED = Path("assets/miniature")
REQUESTS = [Request("a red circle moves up")]
WEIGHTS = ("transformer/miniature", "vae")


@pytest.fixture
def small_build(monkeypatch):
    def run(out):
        flags = ["--out", str(out), "--vae_steps", "2", "--base_steps", "2", "--num_clips", "48"]
        flags += ["--reward_steps", "2", "--reward_clips", "48"]
        monkeypatch.setattr("sys.argv", ["build", *flags])
        monkeypatch.setattr(build, "REFERENCE_CLIPS", 1)
        build.main()
        return [load_file(out / part / "diffusion_pytorch_model.safetensors") for part in WEIGHTS]

    return run


def test_a_build_is_complete_and_repeats_bit_for_bit(small_build, tmp_path):
    first, second = small_build(tmp_path / "a"), small_build(tmp_path / "b")
    assert check_checkpoint(tmp_path / "a", VERSION, REQUESTS) == []
    for one, other in zip(first, second):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert (tmp_path / "a" / build.REFERENCE_STATISTICS).is_file()
    models = [torch.load(tmp_path / name / "VideoReward/checkpoint-1/model.pth", weights_only=True) for name in "ab"]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_the_shipped_checkpoint_is_small_and_sound():
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 8 * 2**20
    assert check_checkpoint(SHIPPED, VERSION, REQUESTS) == []


def test_parts_that_were_left_out_are_drawn_again():
    stored = load_file(SHIPPED / "transformer" / VERSION / "diffusion_pytorch_model.safetensors")
    assert not any(name.startswith(build.DRAWN_PARTS) for name in stored)
    transformer = load_transformer(SHIPPED, VERSION)
    assert transformer.context_embedder_2.linear_1.weight.std() > 0
