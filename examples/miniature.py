"""The bundled video model for the tutorial: velocity and rewards, loaded and computed by the
project.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from hyvideo.data.videos import to_uint8
from hyvideo.miniature.reward import LearnedMiniatureScorer, MiniatureScorer
from hyvideo.miniature.world import CAPTIONS, FPS
from hyvideo.models.conditions import Condition
from hyvideo.models.family import family_of, prepare
from hyvideo.models.loading import load_transformer, load_vae

ROOT = Path("assets/miniature")
LATENTS = 4, 3, 8, 8  # channels, frames, height, width of the latents of 9 frames of 32 x 32 pixels


class Miniature:
    """A transformer of 1.6 million parameters, its VAE and its reward model."""

    def __init__(self):
        self.vae = load_vae(ROOT)
        encode = next(part for part in family_of(self.vae).parts if part.kind == "text").load(
            ROOT, transformer={}, vae=self.vae
        )
        self.conditions = {
            text: Condition(part["states"])
            for text, part in zip(CAPTIONS, encode(CAPTIONS, (0, 0, 0)))
        }
        self.scorers = LearnedMiniatureScorer(ROOT), MiniatureScorer(ROOT)

    def transformer(self) -> nn.Module:
        """Return a new copy of the pretrained transformer."""
        transformer = load_transformer(ROOT, "miniature")
        prepare(transformer, {"text"})
        return transformer

    def velocity(self, prompts: list[str]) -> Callable[[nn.Module, Tensor, Tensor | float], Tensor]:
        """Return a function of transformer, x (batch, ...) and sigma: the estimate of noise minus
        data, like x.
        """

        def estimate(transformer: nn.Module, x: Tensor, sigma: Tensor | float) -> Tensor:
            timestep = 1000 * torch.as_tensor(sigma, dtype=torch.float32).flatten().expand(len(x))
            return transformer(
                x, timestep=timestep, conditions=[self.conditions[prompt] for prompt in prompts]
            )

        return estimate

    @torch.no_grad()
    def rewards(self, x: Tensor, prompts: list[str]) -> list[Tensor]:
        """Decode latents; return the reward model's and the true reward of each video.

        Shape: (batch,) each.
        """
        decoded = self.vae.decode(family_of(self.vae).latents(self.vae.config).unscaled(x)).sample
        videos = list(to_uint8(decoded).transpose(1, 2).contiguous())
        scores = [scorer.score(videos, prompts, fps=FPS) for scorer in self.scorers]
        return [
            torch.tensor([row["VQ"] / 2 + row["MQ"] / 2 + row["TA"] for row in rows])
            for rows in scores
        ]
