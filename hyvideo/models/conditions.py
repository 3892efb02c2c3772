"""Inputs of the transformer besides the latents: timesteps, and the conditions of each video, which
are text, quoted text and a reference image, without padding.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def check_timestep(timestep: Tensor) -> None:
    """Raise ValueError unless the timesteps of a forward pass are float32."""
    if timestep.dtype != torch.float32:
        raise ValueError(
            f"timesteps must be float32, got {timestep.dtype}, which rounds them (bf16: 991.7 to "
            "992)"
        )


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on ``device``; copies to a GPU are asynchronous, through pinned memory."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _to_device_or_none(tensor: Tensor | None, device: torch.device | str) -> Tensor | None:
    return None if tensor is None else to_device(tensor, device)


@dataclass(frozen=True)
class ImageCondition:
    """Features of the given frames, and the latents of the video's first frame or of
    the given video that has them.
    """

    embeds: Tensor | None  # (image tokens, dim); None if the family uses no features
    # float32, scaled for the transformer: (channels, height, width) or, of a model that reads a
    # whole given video, the channels after the noisy ones: (channels, frames, height, width)
    latents: Tensor

    def to(self, device: torch.device | str) -> "ImageCondition":
        return ImageCondition(
            _to_device_or_none(self.embeds, device), to_device(self.latents, device)
        )


@dataclass(frozen=True)
class Condition:
    """Inputs of the transformer that describe one video."""

    text: Tensor | None = None  # (tokens, dim), hidden states of the text encoder, if there is one
    glyph: Tensor | None = None  # (tokens, dim), quoted text, if the prompt has any
    # image features and first-frame latents; image-to-video only
    image: ImageCondition | None = None

    @staticmethod
    def from_parts(parts: Mapping[str, dict[str, Tensor]]) -> "Condition":
        """Return the condition that consists of these encoded parts, by kind."""
        fields = {}
        for kind, part in parts.items():
            if "states" in part:
                fields[kind] = part["states"]
            else:
                fields[kind] = ImageCondition(part.get("embeds"), part["latents"])
        return Condition(**fields)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of tokens of text, glyph and image."""
        parts = self.text, self.glyph, self.image and self.image.embeds
        return tuple(0 if part is None else len(part) for part in parts)

    def to(self, device: torch.device | str) -> "Condition":
        return Condition(
            _to_device_or_none(self.text, device),
            _to_device_or_none(self.glyph, device),
            self.image and self.image.to(device),
        )


@dataclass(frozen=True)
class Conditions:
    """Conditions of a batch of videos, which may differ in length.

    Samples of one prompt share one object.
    """

    samples: tuple[Condition, ...]  # one per video

    def __len__(self) -> int:
        return len(self.samples)

    def select(self, rows: Iterable[int]) -> "Conditions":
        """Return the samples of ``rows``, in that order."""
        return Conditions(tuple(self.samples[row] for row in rows))

    def to(self, device: torch.device | str) -> "Conditions":
        # shared objects stay shared
        moved = {id(sample): sample.to(device) for sample in self.samples}
        return Conditions(tuple(moved[id(sample)] for sample in self.samples))

    def with_text_of(self, other: Condition) -> "Conditions":
        """Return the same images with the text and quoted text of ``other``: the negative branch of
        guidance.
        """
        return Conditions(tuple(replace(other, image=sample.image) for sample in self.samples))

    def __add__(self, other: "Conditions") -> "Conditions":
        return Conditions(self.samples + other.samples)
