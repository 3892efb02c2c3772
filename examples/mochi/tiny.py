"""Checkpoints of random weights in diffusers' layout, for rehearsals and tests: true structure,
minimal width.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyvideo.models.versions import version_defaults
from hyvideo.weights.weight_files import draw_tensor

from .encoders import TEXT_SLOTS

TEXT_WIDTH = 32  # released: 4096
_T5_HEAD = 8  # width of an attention head of the text encoder
_SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")


def transformer_settings(num_heads: int = 2) -> dict[str, Any]:
    """Return the settings of a transformer with heads of 16 channels.

    Released: 48 blocks, 24 heads of 128.
    """
    return {
        "num_attention_heads": num_heads,
        "attention_head_dim": 16,
        "num_layers": 2,
        "pooled_projection_dim": 24,
        "text_embed_dim": TEXT_WIDTH,
        "time_embed_dim": 32,
    }


def vae_settings() -> dict[str, Any]:
    """Return the settings of a VAE with the released compression, latent channels and scale, and
    one group of channels.
    """
    return {
        "encoder_block_out_channels": [32] * 4,
        "decoder_block_out_channels": [32] * 4,
        "layers_per_block": [1] * 5,
    }


def write(root: Path, version: str, *, num_heads: int, prompts: Iterable[str]) -> None:
    """Write a tiny checkpoint of a version.

    Each word of ``prompts`` becomes one token of the text encoder.
    """
    texts = [*prompts, version_defaults(version).negative_prompt]
    words = sorted({"▁" + word for text in texts for word in text.split()})
    characters = "".join(sorted({"▁"}.union(*texts)))
    write_checkpoint(root, transformer_settings(num_heads), vae_settings(), words, characters)


def write_checkpoint(
    root: Path,
    transformer: Mapping[str, Any],
    vae: Mapping[str, Any],
    words: Iterable[str],
    characters: str,
    *,
    seed: int = 0,
) -> None:
    """Write transformer, VAE, T5, tokenizer, scheduler and model_index.json with random weights in
    float32.

    The tokenizer has a token for each of ``words``, which begin with "▁", and for each character.
    """
    import diffusers
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    special = [(token, 0.0) for token in _SPECIAL_TOKENS]
    pieces = [(word, -1.0) for word in words] + [(character, -5.0) for character in characters]
    tokenizer = T5Tokenizer(vocab=special + pieces, extra_ids=0, model_max_length=TEXT_SLOTS)
    t5 = T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=_T5_HEAD,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    models = {
        "transformer": diffusers.MochiTransformer3DModel(**transformer),
        "vae": diffusers.AutoencoderKLMochi(**vae),
        "text_encoder": T5EncoderModel(t5),
    }
    for number, (folder, model) in enumerate(models.items()):
        drawn(model, seed + number).save_pretrained(root / folder)
    tokenizer.save_pretrained(root / "tokenizer")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    scheduler.save_pretrained(root / "scheduler")
    index = {
        "_class_name": "MochiPipeline",
        "_diffusers_version": diffusers.__version__,
        "transformer": ["diffusers", "MochiTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLMochi"],
        "text_encoder": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "T5Tokenizer"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    (root / "model_index.json").write_text(json.dumps(index, indent=2))


def drawn(model: nn.Module, seed: int) -> nn.Module:
    """Fill a model with random weights: matrices keep the scale of their inputs, gains are near 1,
    biases near 0.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.copy_(draw_tensor(seed, name, tuple(weight.shape)))
                if name.endswith("SelfAttention.q.weight"):  # T5 does not scale its scores
                    weight.mul_(_T5_HEAD**-0.5)
            else:
                noise = draw_tensor(seed, f"{name}.drawn", (weight.numel(), 1)).view_as(weight)
                mean = 0.0 if name.endswith("bias") else 1.0
                weight.copy_(mean + 0.1 * noise)
    return model.eval()
