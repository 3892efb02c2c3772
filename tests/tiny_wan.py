"""A small complete Wan checkpoint in diffusers' layout, as in a download, of about 1 MB.

It is written by diffusers and transformers, without this project's loaders, and is their reference. All weights are
random, including biases, norm scales and modulation tables, so that tests detect an omitted weight.
"""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from hyvideo.models.weight_files import draw_tensor

TEXT_WIDTH = 32
_T5_HEAD = 8  # width of an attention head
VAE = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [1.5, 2.1, 0.7, 1.0],
}
# VAE of Wan2.2 TI2V-5B, with residual shortcuts and patches of 2 x 2 pixels as channels.
VAE_22 = VAE | {
    "decoder_base_dim": 12,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
# Words of a single token each: "a a a" is three tokens, followed by "</s>".
WORDS = ("▁a", "▁red", "▁car", "▁turns", "▁left")
CHARACTERS = (
    "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"()&<>-/“”‘’，。：！？色调艳丽过曝静态"
)


def write_wan(
    root: Path,
    *,
    seed: int = 0,
    num_layers: int = 2,
    heads: int = 3,
    head_dim: int = 24,
    ffn_dim: int = 96,
    with_vae_22: bool = False,
) -> Path:
    """Write transformer, VAE, UMT5, tokenizer, scheduler and model_index.json; return ``root``."""
    for name, part in wan_parts(seed, num_layers, heads, head_dim, ffn_dim, with_vae_22).items():
        part.save_pretrained(root / name)
    index = {"_class_name": "WanPipeline", "_diffusers_version": diffusers.__version__}
    index |= {
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    }
    (root / "model_index.json").write_text(json.dumps(index, indent=2))
    return root


def wan_parts(seed: int, num_layers: int, heads: int, head_dim: int, ffn_dim: int, with_vae_22: bool) -> dict[str, Any]:
    """Return the parts of a `WanPipeline` by name, in float32 and eval mode."""
    vae = VAE_22 if with_vae_22 else VAE
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        ffn_dim=ffn_dim,
        num_layers=num_layers,
        text_dim=TEXT_WIDTH,
        freq_dim=32,
        in_channels=vae["z_dim"],
        out_channels=vae["z_dim"],
    )
    tokenizer = _tokenizer()
    umt5 = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=_T5_HEAD,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return {
        "transformer": drawn(transformer, seed),
        "vae": drawn(diffusers.AutoencoderKLWan(**vae), seed + 1),
        "text_encoder": drawn(UMT5EncoderModel(umt5), seed + 2),
        "tokenizer": tokenizer,
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
    }


def wan_pipeline(root: Path) -> diffusers.WanPipeline:
    """Load diffusers' pipeline from a folder, in float32."""
    pipeline = diffusers.WanPipeline.from_pretrained(root, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _tokenizer() -> T5Tokenizer:
    """Return a tokenizer of UMT5's class, without normalization: each character is a separate token."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = [(word, -1.0) for word in WORDS] + [(character, -5.0) for character in CHARACTERS]
    return T5Tokenizer(vocab=special + pieces, extra_ids=0, model_max_length=512)


def drawn(model: nn.Module, seed: int) -> nn.Module:
    """Fill a model with random weights: matrices keep the scale of their inputs, gains are near 1, biases near 0."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and not name.endswith(".gamma"):
                weight.copy_(draw_tensor(seed, name, tuple(weight.shape)))
                if name.endswith("SelfAttention.q.weight"):  # T5 does not scale its attention scores
                    weight.mul_(_T5_HEAD**-0.5)
            else:
                mean = 0.0 if name.endswith("bias") else 1.0
                weight.copy_(mean + 0.1 * draw_tensor(seed, name + ".drawn", (weight.numel(), 1)).view_as(weight))
    return model.eval()
