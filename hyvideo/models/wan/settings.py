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
from hyvideo.weights.tensor_names import tensor_names

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


def given_frames(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the fewest and the most given frames of a video. Wan2.1 image-to-video has the features
    of one picture or, with their positions, of two; Wan2.2 A14B has none and takes one or two.
    """
    if not reads_given_video(config):
        return None
    if not config["image_dim"]:
        return 1, 2
    return (2, 2) if config["pos_embed_seq_len"] else (1, 1)


def reads_given_video(config: Mapping[str, Any]) -> bool:
    """Return whether a transformer's input has the noisy latents, a mask of the given frames (4
    channels) and the latents of the given video, as image-to-video of Wan2.2 A14B.
    """
    return config["in_channels"] == 2 * config["out_channels"] + 4


def _is_ti2v_5b(config: Mapping[str, Any]) -> bool:
    return config["in_channels"] == 48  # channels of the latents of Wan2.2's VAE


def transformer_config_to_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``diffusers.WanTransformer3DModel`` for the original's
    ``config.json``, see `completed`.
    """
    if config.get("model_type") == "flf2v":
        config = {"pos_embed_seq_len": 514} | _features(config) | dict(config)
    return settings_to_diffusers(_TABLE, config) | {
        "attention_head_dim": config["dim"] // config["num_heads"]
    }


def completed(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return a config.json of the original with what only the tensors in its folder say: whether an
    image-to-video model reads CLIP's features, as that of Wan2.1, or none, as that of Wan2.2 A14B.
    """
    if config.get("model_type") != "i2v":
        return config
    if not any(name.startswith("img_emb.") for name in tensor_names(folder)):
        return config
    return _features(config) | dict(config)


def _features(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the features that Wan2.1 image-to-video reads."""
    return {"image_dim": 1280, "added_kv_proj_dim": config["dim"]}


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
        "model_type": "flf2v" if config["pos_embed_seq_len"] else task(config, {}),
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
        "text_len": TEXT_SLOTS,
    }
    return settings_to_original(_TABLE, config, others)
