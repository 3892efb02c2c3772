"""Checkpoint folders with the configs of the released models and no weights, for runs with random
weights.

Transformer and VAE have the released sizes. The text encoder has the released width and few layers,
and the tokenizer of the miniature or one token for each character. With `IS_TINY`, all models are
those of a rehearsal.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hyvideo.models.hunyuan_video15 import tiny as tiny_hunyuan
from hyvideo.models.sizes import tiny_module
from hyvideo.models.versions import version_defaults
from hyvideo.models.wan import tiny as tiny_wan_models
from tests.super_resolution_files import UPSAMPLERS, refiner_config, write_super_resolution

LAYERS_OF_TEXT = 3  # of the text encoder; HunyuanVideo-1.5 does not use the last two
HUNYUAN_TRANSFORMER = {
    "hidden_size": 2048,
    "heads_num": 16,
    "mm_double_blocks_depth": 54,
    "rope_dim_list": [16, 56, 56],
    "text_states_dim": 3584,
    "vision_states_dim": 1152,
}
HUNYUAN_VAE = {"block_out_channels": [128, 256, 512, 1024, 1024], "layers_per_block": 2}
HUNYUAN_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_parameters": {"mrope_section": [16, 24, 24], "rope_theta": 1e6, "rope_type": "default"},
}
HUNYUAN_UPSAMPLER = {"hidden_channels": 64, "num_blocks": 6}  # of 720p
WAN_TRANSFORMER = {
    "num_layers": 30,
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
}
A14B_TRANSFORMER = {
    "num_layers": 40,
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "ffn_dim": 13824,
}
WAN_TEXT = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}


def write(
    root: Path,
    version: str,
    prompts: Iterable[str],
    *,
    is_tiny: bool,
    num_layers: int | None = None,
    sr: str = "",
) -> None:
    """Write the checkpoint of a version, with ``num_layers`` blocks and perhaps a super-resolution
    model ``sr``.
    """
    family = version_defaults(version).family
    if is_tiny:
        tiny_module(family).write(root, version, num_heads=2, prompts=prompts)
        if sr:
            write_super_resolution(root, sr, tiny_hunyuan.TinySettings().transformer, seed=0)
    elif family == "wan":
        _write_wan(root, version, prompts, num_layers)
    else:
        _write_hunyuan(root, version, num_layers, sr)


def _write_hunyuan(root: Path, version: str, num_layers: int | None, sr: str) -> None:
    from transformers import ByT5Tokenizer, T5Config

    settings = tiny_hunyuan.TinySettings()
    transformer = dict(settings.transformer) | HUNYUAN_TRANSFORMER
    if num_layers:
        transformer["mm_double_blocks_depth"] = num_layers
    resolution, task = version.split("_")[:2]
    _write(
        root / "transformer" / version,
        transformer | {"ideal_resolution": resolution, "ideal_task": task},
    )
    _write(root / "vae", dict(settings.vae) | HUNYUAN_VAE)
    if sr:
        _write(root / "transformer" / sr, refiner_config(transformer, sr))
        _write(root / "upsampler" / sr, UPSAMPLERS[sr] | HUNYUAN_UPSAMPLER)
    text = root / "text_encoder" / "llm"
    shutil.copytree(
        tiny_hunyuan.LANGUAGE_MODEL, text, ignore=shutil.ignore_patterns("*.safetensors")
    )
    config = (
        json.loads((text / "config.json").read_text()) | HUNYUAN_TEXT | _layers("full_attention")
    )
    (text / "config.json").write_text(json.dumps(config))
    glyphs = root / "text_encoder" / "byt5-small"
    T5Config(**dict(settings.glyphs)).save_pretrained(glyphs)
    ByT5Tokenizer().save_pretrained(glyphs)
    _write(
        root / "scheduler", {"_class_name": "FlowMatchDiscreteScheduler"}, "scheduler_config.json"
    )


def _write_wan(root: Path, version: str, prompts: Iterable[str], num_layers: int | None) -> None:
    """Write Wan2.1 1.3B, or the two experts of Wan2.2 A14B."""
    from transformers import UMT5Config

    tokenizer = tiny_wan_models.tokenizer_of(prompts, version)
    tokenizer.save_pretrained(root / "tokenizer")
    config = UMT5Config(**WAN_TEXT, num_layers=LAYERS_OF_TEXT, vocab_size=len(tokenizer))
    config.save_pretrained(root / "text_encoder")
    has_experts = version_defaults(version).boundary
    transformer = A14B_TRANSFORMER if has_experts else WAN_TRANSFORMER
    if num_layers:
        transformer = transformer | {"num_layers": num_layers}
    for folder in ("transformer", "transformer_2") if has_experts else ("transformer",):
        _write(root / folder, {"_class_name": "WanTransformer3DModel"} | transformer)
    _write(root / "vae", {"_class_name": "AutoencoderKLWan"})


def _layers(kind: str) -> dict[str, Any]:
    return {"num_hidden_layers": LAYERS_OF_TEXT, "layer_types": [kind] * LAYERS_OF_TEXT}


def _write(folder: Path, config: Mapping[str, Any], name: str = "config.json") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(dict(config)))
