"""The settings of the original HunyuanVideo-1.5 checkpoints (config.json), mapped to diffusers' arguments and back."""

from collections.abc import Mapping
from typing import Any

from hyvideo.data.images import RESOLUTIONS

# Settings of the original whose other values diffusers' class has no code for.
_ONLY_VALUES: dict[str, Any] = {
    "mm_single_blocks_depth": 0,
    "guidance_embed": False,
    "text_pool_type": None,
    "text_projection": "single_refiner",
    "use_attention_mask": True,
    "glyph_byT5_v2": True,
    "vision_projection": "linear",
    "use_cond_type_embedding": True,
    "qkv_bias": True,
    "qk_norm": True,
    "qk_norm_type": "rms",
    "mlp_act_type": "gelu_tanh",
    "attn_param": None,
    "is_reshape_temporal_channels": False,
}
_SPARSE_ATTENTION = "flex-block-attn"

# Not in the original's config.json: all releases have these.
_BYT5_STATES_DIM = 1472
_REFINER_DEPTH = 2

# Settings that only have other names, positive integers.
_TRANSFORMER_SIZES = {
    "heads_num": "num_attention_heads",
    "mm_double_blocks_depth": "num_layers",
    "text_states_dim": "text_embed_dim",
    "vision_states_dim": "image_embed_dim",
}
_VAE_SIZES = {
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "latent_channels": "latent_channels",
    "layers_per_block": "layers_per_block",
    "ffactor_spatial": "spatial_compression_ratio",
    "ffactor_temporal": "temporal_compression_ratio",
}


def transformer_config_to_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``diffusers.HunyuanVideo15Transformer3DModel`` for the original's ``config.json``.

    The number of refiner blocks is not in it; a key ``refiner_depth`` is honoured, otherwise it is 2. Keys
    that neither choose an argument nor a feature (``attn_mode``, notes of our own) are left alone.

    Raises:
        ValueError: A key is missing or of the wrong type, or asks for what diffusers' class does not have.
    """
    for key, value in _ONLY_VALUES.items():
        if config.get(key, value) != value:
            raise ValueError(f"config key {key!r} must be {value!r}, got {config[key]!r}: not in diffusers' class")
    if config.get("attn_mode") == _SPARSE_ATTENTION:
        raise ValueError(f"config key 'attn_mode' is {_SPARSE_ATTENTION!r}: take a version without sparse attention")

    hidden_size, num_heads = _integer(config, "hidden_size"), _integer(config, "heads_num")
    rope_dims = _integers(config, "rope_dim_list")
    if hidden_size % num_heads or sum(rope_dims) != hidden_size // num_heads:
        raise ValueError(
            "config keys 'hidden_size' / 'heads_num' must be the sum of 'rope_dim_list', "
            f"got {hidden_size} / {num_heads} and {rope_dims}"
        )
    patch_size = _integers(config, "patch_size")
    if len(patch_size) != 3 or patch_size[1] != patch_size[2]:
        raise ValueError(f"config key 'patch_size' must be [frames, side, side], got {config['patch_size']}")
    channels = _integer(config, "in_channels")
    resolution = config.get("ideal_resolution") or "480p"
    if resolution not in RESOLUTIONS:
        raise ValueError(f"config key 'ideal_resolution' must be one of {list(RESOLUTIONS)}, got {resolution!r}")
    return {argument: _integer(config, key) for key, argument in _TRANSFORMER_SIZES.items()} | {
        # noisy latents, condition latents, and a mask that says which frames are given
        "in_channels": 2 * channels + 1 if config.get("concat_condition", True) else channels,
        "out_channels": _integer(config, "out_channels") if config.get("out_channels") else channels,
        "attention_head_dim": hidden_size // num_heads,
        "num_refiner_layers": _integer({"refiner_depth": _REFINER_DEPTH} | dict(config), "refiner_depth"),
        "mlp_ratio": _number(config, "mlp_width_ratio"),
        "patch_size": patch_size[1],
        "patch_size_t": patch_size[0],
        "qk_norm": "rms_norm",
        "text_embed_2_dim": _BYT5_STATES_DIM,
        "rope_theta": _number(config, "rope_theta"),
        "rope_axes_dim": rope_dims,
        "target_size": RESOLUTIONS[resolution],
        "task_type": config.get("ideal_task") or "t2v",
        "use_meanflow": bool(config.get("use_meanflow", False)),
    }


def transformer_config_to_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """The original's ``config.json`` for the config of a diffusers transformer.

    Raises:
        ValueError: The original has no way to say a value.
    """
    resolution = {size: name for name, size in RESOLUTIONS.items()}.get(config["target_size"])
    if resolution is None:
        raise ValueError(f"target_size must be one of {sorted(RESOLUTIONS.values())}, got {config['target_size']}")
    if config["text_embed_2_dim"] != _BYT5_STATES_DIM:
        raise ValueError(
            f"text_embed_2_dim must be the original's {_BYT5_STATES_DIM}, got {config['text_embed_2_dim']}"
        )
    conditioned = config["in_channels"] == 2 * config["out_channels"] + 1
    original = {key: config[argument] for key, argument in _TRANSFORMER_SIZES.items()} | {
        "_class_name": "HunyuanVideo_1_5_DiffusionTransformer",
        "patch_size": [config["patch_size_t"], config["patch_size"], config["patch_size"]],
        "in_channels": config["out_channels"] if conditioned else config["in_channels"],
        "concat_condition": conditioned,
        "out_channels": config["out_channels"],
        "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
        "mlp_width_ratio": config["mlp_ratio"],
        "rope_dim_list": list(config["rope_axes_dim"]),
        "rope_theta": config["rope_theta"],
        "text_states_dim_2": None,
        "attn_mode": "flash",
        "use_meanflow": config["use_meanflow"],
        "ideal_resolution": resolution,
        "ideal_task": config["task_type"],
    }
    if config["num_refiner_layers"] != _REFINER_DEPTH:
        original["refiner_depth"] = config["num_refiner_layers"]
    return original | _ONLY_VALUES


def vae_config_to_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``diffusers.AutoencoderKLHunyuanVideo15`` for the original's ``config.json``.

    ``sample_size`` and ``sample_tsize`` are the original's tile sizes, which are the decoder's business.

    Raises:
        ValueError: A key is missing or of the wrong type, or latents are to be shifted.
    """
    if config.get("shift_factor"):
        raise ValueError(f"config key 'shift_factor' must be null, got {config['shift_factor']!r}: not in diffusers")
    return {
        argument: _integer(config, key, at_least=0 if key == "layers_per_block" else 1)
        for key, argument in _VAE_SIZES.items()
    } | {
        "block_out_channels": _integers(config, "block_out_channels"),
        "downsample_match_channel": bool(config.get("downsample_match_channel", True)),
        "upsample_match_channel": bool(config.get("upsample_match_channel", True)),
        "scaling_factor": _number(config, "scaling_factor"),
    }


def vae_config_to_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """The original's ``config.json`` for the config of a diffusers VAE."""
    original = {key: config[argument] for key, argument in _VAE_SIZES.items()}
    return original | {
        "_class_name": "AutoencoderKLConv3D",
        "block_out_channels": list(config["block_out_channels"]),
        "downsample_match_channel": config["downsample_match_channel"],
        "upsample_match_channel": config["upsample_match_channel"],
        "sample_size": 256,
        "sample_tsize": 64,
        "scaling_factor": config["scaling_factor"],
        "shift_factor": None,
    }


def _integer(config: Mapping[str, Any], key: str, at_least: int = 1) -> int:
    value = config.get(key)
    if type(value) is not int or value < at_least:
        raise ValueError(f"config key {key!r} must be an integer of at least {at_least}, got {value!r}")
    return value


def _integers(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = config.get(key)
    if not isinstance(value, (list, tuple)) or not value or not all(type(item) is int and item > 0 for item in value):
        raise ValueError(f"config key {key!r} must be a list of positive integers, got {value!r}")
    return tuple(value)


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if type(value) not in (int, float) or value <= 0:
        raise ValueError(f"config key {key!r} must be a positive number, got {value!r}")
    return float(value)
