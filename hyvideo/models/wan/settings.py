"""The settings of the original Wan checkpoints (config.json), mapped to diffusers' arguments and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hyvideo.models.names import setting, settings_to_diffusers, settings_to_original

NAMES = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
_SETTINGS = NAMES["transformer"]["settings"]
TEXT_SLOTS = 512  # to which texts are padded
_LEFT_OUT = {"patch_size": [1, 2, 2], "text_dim": 4096}  # of the original's config.json, in all releases
_ONLY_VALUES = {"text_len": TEXT_SLOTS, "window_size": [-1, -1], "qk_norm": True, "cross_attn_norm": True}
_ARGUMENTS = {
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 1024,
    "pos_embed_seq_len": None,
}


def transformer_config_to_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``diffusers.WanTransformer3DModel`` for the original's ``config.json``.

    Raises ValueError where a key is missing or of the wrong type, or the model is not a text-to-video model.
    """
    for key, value in _ONLY_VALUES.items():
        if config.get(key, value) != value:
            raise ValueError(f"config key {key!r} must be {value!r}, got {config[key]!r}")
    if config.get("model_type") not in ("t2v", "ti2v"):
        raise ValueError(f"config key 'model_type' must be 't2v' or 'ti2v', got {config.get('model_type')!r}")
    width, num_heads = (setting(config, key, "integers") for key in ("dim", "num_heads"))
    if width % (2 * num_heads):
        raise ValueError(f"config key 'dim' must be a multiple of twice 'num_heads', got {width} and {num_heads}")
    renamed = settings_to_diffusers(_SETTINGS, _LEFT_OUT | dict(config))
    return _ARGUMENTS | renamed | {"attention_head_dim": width // num_heads}


def transformer_config_to_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the original's ``config.json`` for the config of a diffusers transformer."""
    original = settings_to_original(_SETTINGS, config) | {
        "_class_name": "WanModel",
        "model_type": "ti2v" if config["in_channels"] == 48 else "t2v",  # 48 channels are those of TI2V-5B's VAE
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
        "text_len": TEXT_SLOTS,
    }
    return {key: value for key, value in original.items() if _LEFT_OUT.get(key) != value}
