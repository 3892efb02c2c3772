"""A small transformer of Mochi and inputs for it, and small checkpoints, also with odd ratios."""

from pathlib import Path

import torch
from diffusers import MochiTransformer3DModel
from torch.nn.utils.rnn import pad_sequence

from examples.mochi import tiny as tiny_mochi
from hyvideo.models.conditions import Condition
from hyvideo.models.family import install

FOLDER = "examples/mochi"
VERSION = "mochi1"
PROMPTS = ["a red car turns left", "a car turns"]
WORDS = ("▁a", "▁red", "▁car", "▁turns", "▁left")
CHARACTERS = "▁abcdefghijklmnopqrstuvwxyz"
LENGTHS = (7, 19, 1)  # lengths of the texts in tokens


def write_mochi(root: Path, *, odd: bool = False, num_heads: int = 3) -> Path:
    """Write a small checkpoint and return ``root``; with ``odd``, the VAE's spatial ratio is 12
    instead of 8, beside a temporal ratio of 6 and 12 channels.
    """
    vae = tiny_mochi.vae_settings() | ({"spatial_expansions": [2, 2, 3]} if odd else {})
    tiny_mochi.write_checkpoint(
        root, tiny_mochi.transformer_settings(num_heads), vae, WORDS, CHARACTERS
    )
    return root


def tiny(**settings) -> MochiTransformer3DModel:
    model = MochiTransformer3DModel(**tiny_mochi.transformer_settings(3) | settings)
    return tiny_mochi.drawn(model, 0)


def installed(**settings) -> MochiTransformer3DModel:
    model = tiny(**settings)
    install(model)
    return model


def inputs(batch: int = 2, grid: tuple[int, int, int] = (3, 6, 4)) -> dict:
    """Return arguments of this project's forward pass."""
    generator = torch.Generator().manual_seed(1)
    return {
        "latents": torch.randn(batch, 12, *grid, generator=generator),
        "timestep": torch.tensor([937.5, 412.25, 55.1])[:batch],
        "conditions": [
            Condition(torch.randn(length, 32, generator=generator)) for length in LENGTHS[:batch]
        ],
    }


def stock_velocity(model: MochiTransformer3DModel, latents, timestep, conditions):
    """Return the velocity of diffusers' forward pass in this project's convention."""
    texts = pad_sequence([sample.text for sample in conditions], batch_first=True)
    mask = torch.zeros(texts.shape[:2], dtype=torch.bool)
    for row, sample in enumerate(conditions):
        mask[row, : len(sample.text)] = True
    return -model(latents, texts, 1000 - timestep, mask, return_dict=False)[0]
