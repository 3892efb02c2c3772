"""Sizes are read from configs of both layouts, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hyvideo.models.sizes import read_architecture, released_sizes

ROOT = Path(__file__).parents[3]
MINIATURE = ROOT / "assets" / "miniature"


def write(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_sizes_are_read_from_diffusers_names(tmp_path):
    config = {
        "_class_name": "HunyuanVideo15Transformer3DModel",
        "num_layers": 3,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "patch_size": 2,
        "out_channels": 4,
        "text_embed_dim": 32,
    }
    write(tmp_path / "transformer", config)
    sizes = read_architecture(tmp_path, "anything")
    assert (sizes.num_layers, sizes.width, sizes.patch) == (3, 32, (1, 2, 2))
    assert (sizes.out_channels, sizes.text_width) == (4, 32)
    assert not sizes.has_released_encoders


def test_sizes_are_read_from_the_original_names():
    sizes = read_architecture(MINIATURE, "miniature")
    assert (sizes.num_layers, sizes.width, sizes.patch) == (4, 96, (1, 2, 2))
    assert (sizes.spatial_compression_ratio, sizes.temporal_compression_ratio) == (4, 4)
    assert sizes.vae["block_out_channels"] == (16, 32, 32)


def test_number_of_tokens_of_a_video():
    assert released_sizes("480p_t2v").image_tokens(121, 480, 848) == 49_290


def test_an_unknown_version_raises_an_error(tmp_path):
    with pytest.raises(ValueError, match="beauty"):
        read_architecture(tmp_path, "beauty")


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_corrupted_config_raises_an_error(tmp_path, content):
    (write(tmp_path / "transformer" / "480p_t2v", {}) / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config.json"):
        read_architecture(tmp_path, "480p_t2v")


def test_the_sizes_of_this_repositorys_families_need_no_torch():
    code = (
        "import sys; from hyvideo.models import sizes; sizes.released_sizes('wan2.1_t2v_1.3b'); "
        "sizes.read_architecture('assets/miniature', 'miniature'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
