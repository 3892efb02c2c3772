"""Offloading in generation: the same videos bit for bit, the choice by GPU memory, and the peak of
each stage.
"""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import generate
from hyvideo.generation import offloading
from hyvideo.models.lora import LoraPair
from hyvideo.models.lora_saving import save_lora
from hyvideo.models.sizes import released_sizes
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.planning import generation as planner
from hyvideo.settings.config import Config
from tests import tiny_checkpoint
from tests.fake_cuda.counting import counted
from tests.planning.test_generation import VIDEO
from tests.tiny_wan import write_wan

FLAGS = {  # by way of offloading; the last two are flags of HunyuanVideo-1.5
    "none": ["--offloading", "none"],
    "model": ["--offloading", "true"],
    "group": ["--offloading", "true", "--group_offloading", "true"],
}


def hunyuan(folder, monkeypatch):
    """Return the flags of a model with six blocks, a LoRA, and an image."""
    monkeypatch.setitem(tiny_checkpoint.TRANSFORMER, "mm_double_blocks_depth", 6)
    root = tiny_checkpoint.write_original(folder / "ckpts", ("480p_i2v",))
    pair = LoraPair(torch.full((1, 32), 0.1), torch.full((32, 1), 0.1), 1.0)
    save_lora({"transformer_blocks.5.attn.to_q": pair}, folder / "lora")
    image = tiny_checkpoint.write_image(folder / "image.png")
    return [
        "--model_path",
        root,
        "--transformer_version",
        "480p_i2v",
        "--image_path",
        image,
        "--lora_path",
        folder / "lora",
    ]


def wan(folder, monkeypatch):
    root = write_wan(folder / "ckpts", num_layers=6)
    return ["--model_path", root, "--transformer_version", "wan2.1_t2v_1.3b"]


@pytest.mark.system
@pytest.mark.parametrize("family", [hunyuan, pytest.param(wan, marks=pytest.mark.slow)])
def test_offloading_changes_neither_latents_nor_videos(tmp_path, monkeypatch, family):
    model = family(tmp_path, monkeypatch)
    small = (
        "--prompt one two --height 32 --width 48 --video_length 5 --num_inference_steps 2 --device "
        "cpu --seed 3"
    )
    decode, latents = GRPOPipeline.decode, {}
    for name, flags in FLAGS.items():
        taken = latents.setdefault(name, [])
        monkeypatch.setattr(
            GRPOPipeline, "decode", lambda self, x, taken=taken: taken.append(x) or decode(self, x)
        )
        out = tmp_path / name
        arguments = ["generate.py", *model, *small.split(), *flags, "--output_path", out]
        monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
        assert generate.main() == 0
        settings = json.loads((out / "0001.json").read_text())
        assert settings["offloading"] == name
        for number in range(2):
            assert torch.equal(latents[name][number], latents["none"][number])
            videos = [
                (tmp_path / folder / f"000{number}.mp4").read_bytes() for folder in (name, "none")
            ]
            assert videos[0] == videos[1]
    assert not torch.equal(*latents["none"])


@pytest.mark.parametrize(
    "version, weight_dtype, gigabytes, used",
    [
        ("480p_t2v", "bf16", 48, "group"),
        ("480p_t2v", "bf16", 80, "none"),
        ("wan2.2_t2v_a14b", "bf16", 24, "group"),
        ("wan2.2_t2v_a14b", "bf16", 62, "model"),  # both experts have 53 GiB
        ("wan2.2_t2v_a14b", "fp8", 62, "none"),
        ("wan2.2_t2v_a14b", "bf16", 140, "none"),
    ],
)
def test_the_gpu_decides_how_models_are_offloaded(
    monkeypatch, version, weight_dtype, gigabytes, used
):
    memory = SimpleNamespace(total_memory=gigabytes * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(offloading, "read_architecture", lambda root, name: released_sizes(name))
    settings = {"base_weight_dtype": weight_dtype, "partner_weight_dtype": weight_dtype}
    config = Config().with_settings(transformer_version=version, **settings).resolved()
    sampling = replace(config.sampling, frames=81, height=720, width=1280)
    assert offloading.automatic_offloading(torch.device("cuda"), config, sampling) == used
    assert offloading.automatic_offloading(torch.device("cpu"), config, sampling) == "none"


@pytest.mark.slow
def test_offloaded_models_stay_on_the_cpu_between_stages_and_fit_small_gpus():
    gib = counted("tests.fake_cuda.generation")
    assert gib["encoding"] < 2.0, "embedding, two layers and the activations"
    assert gib["group"]["sampling"] < 3.1
    planned = planner.generation_memory(VIDEO, "group").total("sample") / 2**30
    assert gib["group"]["sampling"] == pytest.approx(planned, rel=0.1)
    assert gib["cached"]["sampling"] < 3.3, (
        "cached steps leave a block of 0.28 GiB that was copied ahead"
    )
    assert gib["group"]["tile"] < 18
    # both experts are copied once, and one at a time
    experts = gib["experts"]
    assert experts["copies"]["pinned to device"] == 2 * 27
    assert experts["peak"] < 1.5 * experts["weights"]
