"""Conversion between config.json of original HunyuanVideo-1.5 checkpoints and the arguments of
diffusers' classes.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hyvideo.data.images import RESOLUTIONS
from hyvideo.weights.names import settings_to_diffusers, settings_to_original

NAMES = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text())
_TRANSFORMER = NAMES["transformer"]
_VAE = NAMES["vae"]


def transformer_config_to_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``diffusers.HunyuanVideo15Transformer3DModel`` for the original's
    ``config.json``.

    The original does not list the number of refiner blocks: ``refiner_depth`` is used if present,
    otherwise 2. Raises ValueError if it needs a feature that diffusers' class lacks.
    """
    if config.get("attn_mode") == "flex-block-attn":
        raise ValueError(
            "config key 'attn_mode' must not be 'flex-block-attn'. Use a version without sparse "
            "attention"
        )
    renamed = settings_to_diffusers(_TRANSFORMER, config)
    channels = config["in_channels"]
    in_channels = channels
    if config.get("concat_condition", True):
        # noisy latents, condition latents, and a mask of the frames that have condition latents
        in_channels = 2 * channels + 1
    patch_frames, patch_side, _ = config["patch_size"]
    return renamed | {
        "in_channels": in_channels,
        "out_channels": config.get("out_channels") or channels,
        "attention_head_dim": config["hidden_size"] // config["heads_num"],
        "patch_size": patch_side,
        "patch_size_t": patch_frames,
        "target_size": RESOLUTIONS[config.get("ideal_resolution") or "480p"],
        "task_type": config.get("ideal_task") or "t2v",
    }


def transformer_config_to_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the original's ``config.json`` for a diffusers config."""
    resolutions = {size: name for name, size in RESOLUTIONS.items()}
    conditioned = config["in_channels"] == 2 * config["out_channels"] + 1
    others = {
        "_class_name": "HunyuanVideo_1_5_DiffusionTransformer",
        "patch_size": [config["patch_size_t"], config["patch_size"], config["patch_size"]],
        "in_channels": config["out_channels"] if conditioned else config["in_channels"],
        "concat_condition": conditioned,
        "out_channels": config["out_channels"],
        "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
        "text_states_dim_2": None,
        "attn_mode": "flash",
        "ideal_resolution": resolutions[config["target_size"]],
        "ideal_task": config["task_type"],
    }
    return settings_to_original(_TRANSFORMER, config, others | _TRANSFORMER["only_values"])


# Ignores the original's tile sizes `sample_size` and `sample_tsize`.
vae_config_to_diffusers = partial(settings_to_diffusers, _VAE)


def vae_config_to_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the original's ``config.json`` for the config of a diffusers VAE."""
    return settings_to_original(_VAE, config, _VAE["written"] | _VAE["only_values"])
