"""Conversion between config.json of original HunyuanVideo-1.5 checkpoints and the arguments of
diffusers' classes.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hyvideo.data.images import RESOLUTIONS
from hyvideo.models.names import setting, settings_to_diffusers, settings_to_original

NAMES = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text())
_TRANSFORMER = NAMES["transformer"]
_VAE = NAMES["vae"]


def transformer_config_to_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``diffusers.HunyuanVideo15Transformer3DModel`` for the original's
    ``config.json``.

    The original does not list the number of refiner blocks: ``refiner_depth`` is used if present,
    otherwise 2. Raises ValueError if a key is missing, has the wrong type, or needs a feature that
    diffusers' class lacks.
    """
    if config.get("attn_mode") == "flex-block-attn":
        raise ValueError(
            "config key 'attn_mode' must not be 'flex-block-attn'. Use a version without sparse "
            "attention"
        )
    renamed = settings_to_diffusers(_TRANSFORMER, config)
    hidden_size = setting(config, "hidden_size", "integers")
    num_heads = renamed["num_attention_heads"]
    rope_dims = renamed["rope_axes_dim"]
    if hidden_size % num_heads or sum(rope_dims) != hidden_size // num_heads:
        raise ValueError(
            "config keys 'hidden_size' / 'heads_num' must be the sum of 'rope_dim_list', got "
            f"{hidden_size} / {num_heads} and {rope_dims}"
        )
    patch_size = setting(config, "patch_size", "lists")
    if len(patch_size) != 3 or patch_size[1] != patch_size[2]:
        raise ValueError(
            f"config key 'patch_size' must be [frames, side, side], got {config['patch_size']}"
        )
    channels = setting(config, "in_channels", "integers")
    in_channels = channels
    if config.get("concat_condition", True):
        # noisy latents, condition latents, and a mask of the frames that have condition latents
        in_channels = 2 * channels + 1
    out_channels = channels
    if config.get("out_channels"):
        out_channels = setting(config, "out_channels", "integers")
    resolution = config.get("ideal_resolution") or "480p"
    if resolution not in RESOLUTIONS:
        raise ValueError(
            f"config key 'ideal_resolution' must be one of {list(RESOLUTIONS)}, got {resolution!r}"
        )
    return renamed | {
        "in_channels": in_channels,
        "out_channels": out_channels,
        "attention_head_dim": hidden_size // num_heads,
        "patch_size": patch_size[1],
        "patch_size_t": patch_size[0],
        "target_size": RESOLUTIONS[resolution],
        "task_type": config.get("ideal_task") or "t2v",
    }


def transformer_config_to_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the original's ``config.json`` for a diffusers config.

    Raises ValueError if it cannot represent it.
    """
    resolution = {size: name for name, size in RESOLUTIONS.items()}.get(config["target_size"])
    if resolution is None:
        raise ValueError(
            f"target_size must be one of {sorted(RESOLUTIONS.values())}, got "
            f"{config['target_size']}"
        )
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
        "ideal_resolution": resolution,
        "ideal_task": config["task_type"],
    }
    return settings_to_original(_TRANSFORMER, config, others | _TRANSFORMER["only_values"])


# Ignores the original's tile sizes `sample_size` and `sample_tsize`.
vae_config_to_diffusers = partial(settings_to_diffusers, _VAE)


def vae_config_to_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the original's ``config.json`` for the config of a diffusers VAE."""
    return settings_to_original(_VAE, config, _VAE["written"] | _VAE["only_values"])
