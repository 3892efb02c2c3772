"""A small complete Wan checkpoint in diffusers' layout, as in a download, of about 1 MB.

It is written by diffusers and transformers, without this project's loaders, and is their reference.
All weights are random, including biases, norm scales and modulation tables, so that tests detect an
omitted weight.
"""

from pathlib import Path

import diffusers

from hyvideo.models.wan import tiny

TEXT_WIDTH = tiny.TEXT_WIDTH
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
CHARACTERS = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
CHARACTERS += ".,:;!?'\"()&<>-/“”‘’，。：！？色调艳丽过曝静态"


def write_wan(
    root: Path,
    *,
    seed: int = 0,
    num_layers: int = 2,
    heads: int = 3,
    head_dim: int = 24,
    ffn_dim: int = 96,
    with_vae_22: bool = False,
    is_anyflow: bool = False,
) -> Path:
    """Write transformer, VAE, UMT5, tokenizer, scheduler and model_index.json; return ``root``."""
    transformer = {
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "ffn_dim": ffn_dim,
        "num_layers": num_layers,
    }
    vae = VAE_22 if with_vae_22 else VAE
    tiny.write_checkpoint(
        root, transformer, vae, WORDS, CHARACTERS, seed=seed, is_anyflow=is_anyflow
    )
    return root


def wan_pipeline(root: Path) -> diffusers.WanPipeline:
    """Load diffusers' pipeline from a folder, in float32."""
    pipeline = diffusers.WanPipeline.from_pretrained(root, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
