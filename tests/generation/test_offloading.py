"""Offloading in generation: the same videos bit for bit, the choice by GPU memory, and the peak of
each stage.
"""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import generate
from hyvideo.generation.offloading import resolve
from hyvideo.models.lora import LoraPair
from hyvideo.models.lora_saving import save_lora
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.planning import generation as planner
from hyvideo.settings.offloading import Offloading
from tests import tiny_checkpoint
from tests.fake_cuda.counting import counted
from tests.planning.test_generation import VIDEO
from tests.tiny_wan import write_wan

FLAGS = {
    "plain": [],
    "stages": ["--offloading"],
    "groups of 1": ["--group_offloading"],
    "groups of 4": [
        "--offloading",
        "on",
        "--group_offloading",
        "on",
        "--overlap_group_offloading",
        "off",
    ],
}
USED = {
    "plain": (False, False, False),
    "stages": (True, False, False),
    "groups of 1": (True, True, True),
    "groups of 4": (True, True, False),
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
        assert tuple(settings[key] for key in vars(Offloading())) == USED[name]
        for number in range(2):
            assert torch.equal(latents[name][number], latents["plain"][number])
            videos = [
                (tmp_path / folder / f"000{number}.mp4").read_bytes() for folder in (name, "plain")
            ]
            assert videos[0] == videos[1]
    assert not torch.equal(*latents["plain"])


@pytest.mark.parametrize(
    "given, gigabytes, used",
    [
        ((None, None, None), 48, (True, True, True)),
        ((True, False, None), 48, (True, False, False)),
        ((True, None, True), 80, (True, False, False)),
        ((None, None, None), 0, (False, False, False)),
    ],
)
def test_small_gpus_offload_in_groups_by_default(monkeypatch, given, gigabytes, used):
    memory = SimpleNamespace(total_memory=gigabytes * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert resolve(Offloading(*given), torch.device("cuda" if gigabytes else "cpu")) == Offloading(
        *used
    )


@pytest.mark.slow
def test_offloaded_models_stay_on_the_cpu_between_stages_and_fit_small_gpus():
    gib = counted("tests.fake_cuda.generation")
    assert gib["encoding"] < 1.6, "embedding, one layer and the activations"
    assert gib["groups"]["sampling"] < 3.7 and gib["overlap"]["sampling"] < 3.1
    for mode, overlap in (("groups", False), ("overlap", True)):
        planned = (
            planner.generation_memory(VIDEO, Offloading(True, True, overlap)).total("sample")
            / 2**30
        )
        assert gib[mode]["sampling"] == pytest.approx(planned, rel=0.1)
    assert gib["cached groups"]["sampling"] < 3.0, "groups of one block"
    assert gib["cached overlap"]["sampling"] < 3.3, (
        "cached steps leave a block of 0.28 GiB that was copied ahead"
    )
    assert gib["groups"]["tile"] < 18
