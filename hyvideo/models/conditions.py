"""Conditions of the transformer for each video: text, quoted text, reference image, each without padding.

The original pads them to 1,000 + 256 + 729 slots and masks; nothing that is masked changes the result.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

GLYPH_WIDTH = 1472  # of ByT5's hidden states


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on ``device``; to a GPU it goes through pinned memory, so that nothing waits."""
    is_pinned = torch.device(device).type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if is_pinned else tensor).to(device, non_blocking=True)


@dataclass(frozen=True)
class ImageCondition:
    """Features of a reference image and the latents of the first frame."""

    embeds: Tensor  # (image tokens, dim)
    latents: Tensor  # (channels, height, width), float32, times the VAE's scaling factor

    def to(self, device: torch.device | str) -> "ImageCondition":
        return ImageCondition(to_device(self.embeds, device), to_device(self.latents, device))


@dataclass(frozen=True)
class Condition:
    """Inputs of the transformer that describe one video."""

    text: Tensor  # (tokens, dim)
    glyph: Tensor  # (glyph tokens, 1472); no tokens without quoted text
    image: ImageCondition | None = None  # in image-to-video

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Tokens of text, glyph and image."""
        return len(self.text), len(self.glyph), 0 if self.image is None else len(self.image.embeds)

    def to(self, device: torch.device | str) -> "Condition":
        image = self.image and self.image.to(device)
        return Condition(to_device(self.text, device), to_device(self.glyph, device), image)


@dataclass(frozen=True)
class Conditions:
    """Conditions of a batch of videos, whatever the length of each. Samples of one prompt share one object."""

    samples: tuple[Condition, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def select(self, rows: Iterable[int]) -> "Conditions":
        """The samples of ``rows``, in that order."""
        return Conditions(tuple(self.samples[row] for row in rows))

    def to(self, device: torch.device | str) -> "Conditions":
        moved = {id(sample): sample.to(device) for sample in self.samples}  # shared objects stay shared
        return Conditions(tuple(moved[id(sample)] for sample in self.samples))

    def with_text_of(self, other: Condition) -> "Conditions":
        """The same images with the text and the quoted text of ``other``: the negative branch of guidance."""
        return Conditions(tuple(replace(other, image=sample.image) for sample in self.samples))

    def __add__(self, other: "Conditions") -> "Conditions":
        return Conditions(self.samples + other.samples)

    @property
    def texts(self) -> list[Tensor]:
        return [sample.text for sample in self.samples]

    @property
    def glyphs(self) -> list[Tensor]:
        return [sample.glyph for sample in self.samples]

    def image_embeds(self, width: int) -> list[Tensor]:
        """Vision features of each sample, no tokens where it has no image. Shape of each: (tokens, width)."""
        return [s.text.new_zeros(0, width) if s.image is None else s.image.embeds for s in self.samples]

    def image_channels(self, latents: Tensor) -> Tensor:
        """Channels beside the noisy latents: the first frame's latents, then a mask that is 1 where they are.

        Shape: (batch, channels + 1, frames, height, width).
        """
        batch, channels, *sizes = latents.shape
        channels_beside = latents.new_zeros(batch, channels + 1, *sizes)
        for row, sample in enumerate(self.samples):
            if sample.image is not None:
                channels_beside[row, :channels, 0] = sample.image.latents
                channels_beside[row, channels, 0] = 1.0
        return channels_beside
