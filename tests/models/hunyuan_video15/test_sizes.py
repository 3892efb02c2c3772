"""Tests that parameter counts match the classes and that configs of both layouts are read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel

from hyvideo.models.hunyuan_video15.sizes import Architecture
from hyvideo.models.loading import load_transformer
from hyvideo.models.lora import training_config
from hyvideo.models.sizes import read_architecture

ROOT = Path(__file__).parents[3]
MINIATURE = ROOT / "assets" / "miniature"


@pytest.fixture(scope="module")
def small():
    with torch.device("meta"):
        return HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=3,
            num_refiner_layers=1,
            patch_size=2,
            text_embed_dim=32,
            text_embed_2_dim=24,
            image_embed_dim=20,
            rope_axes_dim=(4, 6, 6),
        )


def write(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_released_models_have_the_published_number_of_parameters():
    assert Architecture().parameters == 8_326_608_160
    assert Architecture(use_meanflow=True).parameters == 8_331_330_848
    assert read_architecture("nowhere", "480p_i2v_step_distilled").use_meanflow
    assert read_architecture("nowhere", "720p_t2v") == Architecture()


def test_parameters_of_a_diffusers_config_match_its_class(small, tmp_path):
    small.save_config(write(tmp_path / "transformer", {}))
    architecture = read_architecture(tmp_path, "anything")
    assert architecture.parameters == sum(p.numel() for p in small.parameters())
    assert (architecture.patch_size_t, architecture.patch_size) == (
        1,
        2,
    ) and architecture.num_layers == 3


def test_parameters_of_an_original_config_match_its_model():
    architecture = read_architecture(MINIATURE, "miniature")
    model = load_transformer(MINIATURE, "miniature", random_weights_seed=0)
    assert architecture.parameters == sum(p.numel() for p in model.parameters())
    assert (architecture.spatial_compression_ratio, architecture.block_out_channels) == (
        4,
        (16, 32, 32),
    )


def test_lora_parameters_match_the_default_targets(small, tmp_path):
    small.save_config(write(tmp_path / "transformer", {}))
    targets = training_config(small, rank=5, alpha=5).target_modules
    linears = [
        module
        for name, module in small.named_modules()
        if name in targets.replace("\\", "").split("|")
    ]
    expected = sum(5 * (linear.in_features + linear.out_features) for linear in linears)
    assert read_architecture(tmp_path, "anything").lora_parameters(5) == expected > 0


@pytest.mark.parametrize(
    "frames, height, width, tokens",
    [(121, 480, 848, 49_290), (121, 720, 1280, 111_600), (81, 480, 848, 33_390)],
)
def test_number_of_tokens_of_a_video(frames, height, width, tokens):
    assert Architecture().image_tokens(frames, height, width) == tokens


def test_an_unsupported_video_size_raises_an_error():
    with pytest.raises(ValueError, match="width must be a multiple of 16, got 850"):
        Architecture().image_tokens(121, 480, 850)


@pytest.mark.parametrize(
    "version, message",
    [
        ("beauty", "must be one of 480p_t2v, .*, got 'beauty'"),
        ("720p_sr_distilled", "super-resolution"),
    ],
)
def test_an_unknown_version_raises_an_error(tmp_path, version, message):
    with pytest.raises(ValueError, match=message):
        read_architecture(tmp_path, version)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not the conf"),
        ("[]", "JSON object, got list"),
        ("{}", "is not the configuration of a known model"),
    ],
)
def test_a_corrupted_config_raises_an_error(tmp_path, content, message):
    (write(tmp_path / "transformer" / "480p_t2v", {}) / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_architecture(tmp_path, "480p_t2v")


def test_planning_needs_no_torch():
    modules = [
        f"hyvideo.planning.{file.stem}" for file in (ROOT / "hyvideo" / "planning").glob("*.py")
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
