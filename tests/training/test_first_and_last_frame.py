"""A small FLF2V model trains on a first and a last frame, and generates from its checkpoint."""

import json
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import generate
from hyvideo.data.videos import read_video
from hyvideo.models.wan import tiny
from hyvideo.trainer import Trainer
from tests.test_trainer import CPU, Redness

VERSION = "wan2.1_flf2v_14b_720p"
PROMPTS = ("a red car turns left", "a car turns")
COLORS = {"one": (220, 40, 30), "two": (20, 90, 200), "three": (60, 160, 50)}


@pytest.fixture
def config(tiny_config, tmp_path):
    """Two prompts, of which one has the frames one and two, the other two and three."""
    root = tmp_path / "ckpts"
    tiny.write(root, VERSION, num_heads=2, prompts=PROMPTS)
    generator = torch.Generator().manual_seed(0)
    for name, color in COLORS.items():
        noise = torch.randint(-20, 20, (40, 60, 3), generator=generator)
        pixels = (torch.tensor(color) + noise).clamp(0, 255).byte()
        Image.fromarray(pixels.numpy()).save(tmp_path / f"{name}.png")
    csv = tmp_path / "prompts.csv"
    csv.write_text(
        "prompt,ref_image_path,ref_last_image_path\n"
        f"{PROMPTS[0]},one.png,two.png\n{PROMPTS[1]},two.png,three.png\n"
    )
    return tiny_config.with_settings(
        pretrained_model_root=str(root),
        transformer_version=VERSION,
        random_weights=False,
        encoder_dtype="fp32",
        prompts_csv=str(csv),
        height=32,
        width=48,
        sample_n_frames=9,
        cfg_scale=2.0,
        shift=3.0,
        mini_batch_size_per_update=4,
        lora_rank=2,
        learning_rate=1e-2,
        reward_model=["test"],
        precompute_conditions=True,
        max_steps=1,
        save_interval=1,
        num_threads=1,
    )


@pytest.mark.system
def test_a_run_with_two_frames_trains_and_its_checkpoint_generates(
    config, mesh, tmp_path, monkeypatch, capsys
):
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    trainer.train()
    (line,) = (trainer.output_dir / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["policy/ratio_first_deviation"] == 0.0
    assert metrics["grad/norm"] > 0 and metrics["reward/std"] > 0
    changed = [
        name
        for name, weight in trainer.run.policy.trained.items()
        if "lora_B" in name and weight.any()
    ]
    assert any("add_k_proj" in name for name in changed)
    assert any("attn1.to_q" in name for name in changed)
    stored = [load_file(path) for path in (trainer.output_dir / "conditions").glob("image-*")]
    assert [part["embeds"].shape[0] for part in stored] == [514, 514]
    mask = stored[0]["latents"][:4]
    assert mask[:, 0].eq(1).all() and mask[3, -1].eq(1).all()
    assert not mask[:, 1].any() and not mask[:3, -1].any()
    (saved,) = (trainer.output_dir / "checkpoints").glob("0*")
    one, two = (str(tmp_path / f"{name}.png") for name in ("one", "two"))

    def made(first, last):
        folder = tmp_path / "videos"
        flags = ["--checkpoint_path", saved, "--prompt", PROMPTS[0], "--image_path", first]
        flags += ["--last_image_path", last, "--output_path", folder, "--num_inference_steps", "2"]
        flags += ["--height", "32", "--width", "48", "--video_length", "9", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, flags)])
        assert generate.main() == 0, capsys.readouterr().err
        record = json.loads((folder / "0000.json").read_text())
        assert (record["image"], record["last_image"]) == (first, last)
        return read_video(folder / "0000.mp4")[0]

    video = made(one, two)
    assert len(video) == 9
    assert not torch.equal(made(two, one), video)
    assert not torch.equal(made(one, one), video)
