"""Conversion of tensor names and config.json settings between the original Wan transformer and
diffusers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hyvideo.models.versions import Task
from hyvideo.weights.names import (
    LoraNames,
    both_directions,
    settings_to_diffusers,
    settings_to_original,
)

NAMES = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
ANYFLOW = "AnyFlowTransformer3DModel"  # diffusers' class of students with a second time embedder
TEXT_SLOTS = 512  # maximum and padded length of a text in tokens, including the end token
_TABLE = NAMES["transformer"]

transformer_to_diffusers, transformer_to_original = both_directions(
    NAMES, "transformer", "Wan transformer"
)
LORA_NAMES = LoraNames(NAMES, transformer_to_diffusers)


def task(config: Mapping[str, Any], index: Mapping[str, Any]) -> Task:
    """Return the task of a model. TI2V-5B, and models whose model_index.json has
    ``expand_timesteps``, diffusers' name for a timestep per token, also make videos from a first
    frame.
    """
    if reads_given_video(config):
        return "i2v"
    return "ti2v" if _is_ti2v_5b(config) or index.get("expand_timesteps") else "t2v"


def reads_given_video(config: Mapping[str, Any]) -> bool:
    """Return whether a transformer's input has the noisy latents, a mask of the given frames (4
    channels) and the latents of the given video, as image-to-video of Wan2.2 A14B.
    """
    return config["in_channels"] == 2 * config["out_channels"] + 4


def _is_ti2v_5b(config: Mapping[str, Any]) -> bool:
    return config["in_channels"] == 48  # channels of the latents of Wan2.2's VAE


def transformer_config_to_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``diffusers.WanTransformer3DModel`` for the original's
    ``config.json``.
    """
    return settings_to_diffusers(_TABLE, config) | {
        "attention_head_dim": config["dim"] // config["num_heads"]
    }


def is_flow_map(config: Mapping[str, Any]) -> bool:
    """Return whether a transformer's config describes AnyFlow, which reads where a step ends."""
    return "deltatime_type" in config


def anyflow_only_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Raise ValueError: AnyFlow has no other layout than diffusers'."""
    raise ValueError(
        f"AnyFlow has only diffusers' layout, with _class_name {ANYFLOW}, got "
        f"{config.get('_class_name')!r}. Load a folder with this class, and export in the form "
        "diffusers"
    )


def transformer_config_to_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the original's ``config.json`` for the config of a diffusers transformer."""
    others = {
        "_class_name": "WanModel",
        "model_type": task(config, {}),
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
        "text_len": TEXT_SLOTS,
    }
    return settings_to_original(_TABLE, config, others)
