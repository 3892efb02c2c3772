"""Checkpoints of random weights in the released layout, for rehearsals and tests: true structure,
minimal width.

The default settings keep what determines the shapes of a run's data: latent channels, compression,
patches, levels of the VAE, features of the image encoder, and the length of its features. Widths,
heads and layers are minimal.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyvideo.files.files import ROOT
from hyvideo.models.loading import load_transformer, load_vae
from hyvideo.models.saving import save_original
from hyvideo.models.versions import version_defaults
from hyvideo.weights.weight_files import draw_tensor

# Text is encoded by the language model of the miniature, which has the class of the released one.
LANGUAGE_MODEL = ROOT / "assets" / "miniature" / "text_encoder" / "llm"
TEXT_WIDTH = 64  # of this language model; released: 3584
# Special tokens after the 384 tokens of ByT5's tokenizer: first the colors, then the fonts.
COLORS = {"white": 0, "black": 1}
FONTS = {"en-A": 0, "en-B": 1, "cn-C": 2, "jp-D": 3}
GLYPH_PREFIX = "module.text_tower.encoder."
VISION_WIDTH = 24  # of the image encoder's features; released: 1152


def transformer_settings(num_heads: int = 2) -> dict[str, Any]:
    """Return the settings of a transformer with heads of 16 channels.

    Released: 54 blocks, 16 heads of 128.
    """
    return {
        "patch_size": [1, 1, 1],
        "in_channels": 32,
        "concat_condition": True,
        "out_channels": 32,
        "hidden_size": 16 * num_heads,
        "heads_num": num_heads,
        "mlp_width_ratio": 4,
        "mm_double_blocks_depth": 2,
        "rope_dim_list": [4, 6, 6],
        "rope_theta": 256,
        "text_states_dim": TEXT_WIDTH,
        "vision_states_dim": VISION_WIDTH,
        "use_meanflow": False,
    }


def _vae_settings() -> dict[str, Any]:
    """Return the settings of a VAE with 16-fold spatial and 4-fold temporal compression into 32
    channels.
    """
    return {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 32,
        # released: 128, 256, 512, 1024, 1024, with two layers each
        "block_out_channels": [4, 8, 16, 64, 64],
        "layers_per_block": 1,
        "ffactor_spatial": 16,
        "ffactor_temporal": 4,
        "sample_size": 256,
        "sample_tsize": 64,
        "scaling_factor": 1.03682,
        "shift_factor": None,
        "downsample_match_channel": True,
        "upsample_match_channel": True,
    }


def _glyph_settings() -> dict[str, Any]:
    """Return the settings of ByT5 with the width that the transformer's projection requires."""
    return {
        "vocab_size": 384,
        "d_model": 1472,
        "d_kv": 16,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
    }


def _vision_settings() -> dict[str, Any]:
    """Return the settings of a SigLIP with 729 features per image."""
    return {
        "hidden_size": VISION_WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 384,
        "patch_size": 14,
    }


@dataclass(frozen=True)
class TinySettings:
    """Settings of the models, under the names of their config.json."""

    transformer: Mapping[str, Any] = field(default_factory=transformer_settings)
    vae: Mapping[str, Any] = field(default_factory=_vae_settings)
    glyphs: Mapping[str, Any] = field(default_factory=_glyph_settings)
    vision: Mapping[str, Any] = field(default_factory=_vision_settings)


def write(root: Path, version: str, *, num_heads: int, prompts: Iterable[str]) -> None:
    """Write a tiny checkpoint of a version.

    Each word of ``prompts`` becomes one token of the text encoder.
    """
    settings = TinySettings(transformer=transformer_settings(num_heads))
    write_checkpoint(root, [version], settings, seed=0)
    _add_words(root / "text_encoder" / "llm", prompts)


def write_checkpoint(
    root: Path, versions: Iterable[str], settings: TinySettings, *, seed: int
) -> None:
    """Write all parts in the original layout, with random weights; no layer keeps a zero
    initialization.

    The names of ``versions`` determine the tasks of the transformers. All of them have the same
    weights.
    """
    for version in versions:
        _write_transformer(root, version, settings.transformer, seed)
    _write_config(root / "vae", settings.vae)
    save_original(load_vae(root, random_weights_seed=seed), root / "vae", dtype=torch.float32)
    shutil.copytree(LANGUAGE_MODEL, root / "text_encoder" / "llm")
    write_glyph_encoder(root / "text_encoder", settings.glyphs, seed)
    _write_vision(root / "vision_encoder" / "siglip", settings.vision, seed)
    (root / "scheduler").mkdir()
    (root / "scheduler" / "scheduler_config.json").write_text(
        '{"_class_name": "FlowMatchDiscreteScheduler"}'
    )


def _write_transformer(root: Path, version: str, settings: Mapping[str, Any], seed: int) -> None:
    resolution, task = version.split("_")[:2]
    config = dict(settings)
    config["ideal_resolution"] = resolution
    config["ideal_task"] = task
    config["use_meanflow"] = version_defaults(version).is_flow_map
    folder = root / "transformer" / version
    _write_config(folder, config)
    save_original(
        load_transformer(root, version, random_weights_seed=seed), folder, dtype=torch.float32
    )


def _add_words(folder: Path, prompts: Iterable[str]) -> None:
    """Add the words of prompts to the tokenizer and the embedding of a language model.

    The miniature's small vocabulary would give a text two to three times as many tokens as the
    released one.
    """
    from transformers import AddedToken, AutoTokenizer, Qwen2_5_VLTextModel

    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = sorted({word for prompt in prompts for word in prompt.split()})
    tokenizer.add_tokens([f" {word}" for word in words])
    # at the start of a line
    tokenizer.add_tokens([AddedToken(word, single_word=True) for word in words])
    tokenizer.save_pretrained(folder)
    model = Qwen2_5_VLTextModel.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)


def write_glyph_encoder(
    folder: Path, settings: Mapping[str, Any], seed: int, *, dtype: torch.dtype = torch.float32
) -> None:
    """Write ByT5's tokenizer and an encoder of random weights, in the original's layout."""
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    T5Config(**settings).save_pretrained(folder / "byt5-small")
    ByT5Tokenizer().save_pretrained(folder / "byt5-small")
    with_special_tokens = dict(settings)
    with_special_tokens["vocab_size"] += len(COLORS) + len(FONTS)
    encoder = drawn(T5EncoderModel(T5Config(**with_special_tokens)), seed).encoder
    state = {GLYPH_PREFIX + name: tensor.to(dtype) for name, tensor in encoder.state_dict().items()}
    for part in ("assets", "checkpoints"):
        (folder / "Glyph-SDXL-v2" / part).mkdir(parents=True)
    (folder / "Glyph-SDXL-v2" / "assets" / "color_idx.json").write_text(json.dumps(COLORS))
    (folder / "Glyph-SDXL-v2" / "assets" / "multilingual_10-lang_idx.json").write_text(
        json.dumps(FONTS)
    )
    torch.save({"state_dict": state}, folder / "Glyph-SDXL-v2" / "checkpoints" / "byt5_model.pt")


def _write_vision(folder: Path, settings: Mapping[str, Any], seed: int) -> None:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    drawn(SiglipVisionModel(SiglipVisionConfig(**settings)), seed).save_pretrained(
        folder / "image_encoder"
    )
    side = settings["image_size"]
    preprocessor = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": "SiglipImageProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": side, "width": side},
    }
    (folder / "feature_extractor").mkdir()
    (folder / "feature_extractor" / "preprocessor_config.json").write_text(json.dumps(preprocessor))


def drawn(model: nn.Module, seed: int) -> nn.Module:
    """Fill all weights of a model, including biases, from a seed."""
    state = {
        name: draw_tensor(seed, name, tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(state)
    return model


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
