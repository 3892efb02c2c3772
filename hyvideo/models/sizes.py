"""Sizes of a transformer and its VAE, for counting parameters, bytes and FLOPs, without torch.

A family's ``sizes.py`` defines ``read``, from the settings of transformer and VAE, and
``released``, from a version.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hyvideo.data.files import read_json
from hyvideo.data.text import nearest
from hyvideo.models.registry import class_problem, module_of, packages
from hyvideo.models.versions import FAMILIES, RELEASED, UNSUPPORTED, version_defaults


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward pass of the transformer for one video and one guidance branch."""

    image: float  # linear layers on image tokens
    text: float  # linear layers on text tokens, repeated on every rank of a sequence-parallel group
    attention: float

    @property
    def total(self) -> float:
        return self.image + self.text + self.attention

    @property
    def products(self) -> float:
        """FLOPs of matrix products outside attention."""
        return self.image + self.text

    def per_rank(self, sp_size: int) -> "ForwardFlops":
        """Return the FLOPs of one rank of a sequence-parallel group."""
        return ForwardFlops(self.image / sp_size, self.text, self.attention / sp_size)


class Sizes:
    """Sizes of a transformer and its VAE; a family's frozen dataclass defines these as fields,
    properties or methods.

    "Widths" measure memory per token, in units of the transformer's width.
    """

    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    mlp_ratio: float  # width of the MLP's hidden layer / width
    patch: tuple[int, int, int]  # frames, height and width of a token, in latents
    out_channels: int  # channels of the latents
    text_width: int  # width of the text encoder's states
    is_released: bool  # whether the encoders are the released ones, the only ones of known size
    spatial_compression_ratio: int
    temporal_compression_ratio: int
    block_parameters: int
    root_parameters: int  # parameters outside the blocks
    matrix_parameters: int  # parameters of the blocks' matrices, which Muon trains
    # Parameters of layers whose outputs depend on the timestep alone; if frozen, they are cached
    # and not on the GPU.
    modulation_parameters: int = 0
    num_modulations: int = 0  # such layers
    reads_ends: bool = False  # a flow map: its forward pass also reads where a step ends
    num_attentions: int  # attention layers per block
    # saved by a block for its backward pass, except the MLP's hidden layer, which is saved twice
    fixed_widths: float
    inference_widths: float  # peak of a block without gradients
    backward_widths: float  # peak of a block's backward pass, beyond the saved tensors
    vae_parameters: float
    decode_flops: float  # per pixel and frame

    # rank -> parameters of an adapter on all trainable matrices of the blocks
    lora_parameters: Callable[[int], int]
    # prompt tokens -> text tokens that pass through the blocks
    block_text_tokens: Callable[[int], int]
    forward: Callable[[int, int], ForwardFlops]  # (image tokens, text tokens) -> FLOPs
    # (bytes per number, *, with_images, in_groups) -> bytes of the encoders
    encoder_bytes: Callable[..., float]
    # (videos, frames, height, width) -> peak number of values while decoding tiles of this size,
    # without the videos
    decoding_values: Callable[[int, int, int, int], float]

    # like ``decoding_values``, for decoding with a gradient and its backward pass, which computes
    # the features again
    gradient_values: Callable[[int, int, int, int], float]

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def hidden(self) -> int:
        """Width of the MLP's hidden layer."""
        return round(self.mlp_ratio * self.width)

    @property
    def parameters(self) -> int:
        return self.num_layers * self.block_parameters + self.root_parameters

    @property
    def saved_widths(self) -> float:
        """Widths that a block saves per token for its backward pass."""
        return self.fixed_widths + 2 * self.mlp_ratio

    def check_frames(self, frames: int, name: str = "the number of frames") -> None:
        """Raise ValueError if the VAE has no latents for this number of frames."""
        ratio = self.temporal_compression_ratio
        if (frames - 1) % ratio == 0:
            return
        below = (frames - 1) // ratio * ratio + 1
        nearest = f"{below} or {below + ratio}" if below > 0 else "1"
        raise ValueError(
            f"{name} must be {ratio}n + 1, because the VAE compresses {ratio} frames after the "
            f"first into one latent frame, got {frames}; use {nearest}"
        )

    def latent_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return frames, height and width of a video's latents.

        Raises ValueError for an unsupported size.
        """
        self.check_frames(frames)
        ratio = self.spatial_compression_ratio
        for name, pixels, patch in (
            ("height", height, self.patch[1]),
            ("width", width, self.patch[2]),
        ):
            if pixels % (ratio * patch):
                raise ValueError(f"{name} must be a multiple of {ratio * patch}, got {pixels}")
        return (frames - 1) // self.temporal_compression_ratio + 1, height // ratio, width // ratio

    def video_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return frames, height and width of the video of latents; the inverse of `latent_size`."""
        ratio = self.spatial_compression_ratio
        return (frames - 1) * self.temporal_compression_ratio + 1, height * ratio, width * ratio

    def decoding_bytes(
        self, videos: int, size: Sequence[int], tile: int, value_bytes: int
    ) -> float:
        """Return the peak bytes of decoding videos (frames, height, width) in tiles, and of the
        videos.
        """
        frames, *sides = size
        height, width = (min(tile or side, side) for side in sides)
        values = self.decoding_values(videos, frames, height, width)
        # The tiles, and the video into which they are blended.
        return (values + videos * 2 * 3 * math.prod(size)) * value_bytes

    def gradient_bytes(
        self, videos: int, size: Sequence[int], tile: int, value_bytes: int
    ) -> float:
        """Return the peak bytes of decoding videos in tiles with a gradient, and of its backward
        pass.
        """
        frames, *sides = size
        height, width = (min(tile or side, side) for side in sides)
        values = self.gradient_values(videos, frames, height, width)
        # The tiles, the video into which they are blended, and the gradients of both.
        return (values + videos * 4 * 3 * math.prod(size)) * value_bytes

    def image_tokens(self, frames: int, height: int, width: int) -> int:
        """Return the number of tokens of a video."""
        return math.prod(
            size // p for size, p in zip(self.latent_size(frames, height, width), self.patch)
        )


def linear(inputs: int, outputs: int) -> int:
    """Return the number of parameters of a linear layer with bias."""
    return (inputs + 1) * outputs


def read_architecture(root: str | Path, version: str) -> Sizes:
    """Return the sizes from the transformer's config.json below ``root`` if it exists, else those
    of the release.

    Raises ValueError if the version is unsupported or neither released nor present, or if its
    config.json is corrupted.
    """
    if version in UNSUPPORTED:
        raise ValueError(f"transformer_version {version} is not supported: {UNSUPPORTED[version]}")
    folder, vae = Path(root) / "transformer", Path(root) / "vae" / "config.json"
    for path in (folder / version / "config.json", folder / "config.json"):
        if path.is_file():
            try:
                config, vae_config = (
                    read_json(path, "transformer"),
                    read_json(vae, "VAE") if vae.is_file() else {},
                )
                sizes = sizes_module(_family(config, version)).read(config, vae_config)
                # Raises for settings of the wrong type.
                assert sizes.parameters and sizes.saved_widths and sizes.latent_size(1, 0, 0)
                return sizes
            except (OSError, ValueError, TypeError, ArithmeticError, LookupError) as error:
                raise ValueError(
                    f"{path} is not the configuration of a known model ({error})"
                ) from error
    if version not in RELEASED:
        names, file = ", ".join(RELEASED), folder / version / "config.json"
        hint = nearest(version, RELEASED)
        raise ValueError(
            f"transformer_version must be one of {names}, or {file} must exist, got {version!r}"
            f"{f'; {hint}' if hint else ''}"
        )
    return sizes_module(RELEASED[version].family).released(version)


def _family(config: Mapping[str, Any], version: str) -> str:
    """Return the family of a transformer's config.json: by its class name or, if it has none,
    of the version.

    Raises ValueError for a class of no known family.
    """
    if "_class_name" not in config:
        return version_defaults(version).family or FAMILIES[0]
    class_name = str(config["_class_name"])
    if class_name not in packages():
        raise ValueError(class_problem(class_name))
    return packages()[class_name]


def family_of_version(root: str | Path, version: str) -> str:
    """Return the family of a version: by its config.json below ``root``, otherwise the listed
    one; empty if neither is known.
    """
    folder = Path(root) / "transformer"
    for path in (folder / version / "config.json", folder / "config.json"):
        if path.is_file():
            return _family(read_json(path, "transformer"), version)
    return version_defaults(version).family


def sizes_module(family: str) -> ModuleType:
    """Import the ``sizes`` module of a family, which defines ``read`` and ``released``."""
    return module_of(family, "sizes")


def thin_module(family: str) -> ModuleType:
    """Import the ``thin`` module of a family, whose ``write`` makes a checkpoint of minimal width
    for a rehearsal.
    """
    return module_of(family, "thin")


def fields_of(
    cls: type, config: Mapping[str, Any], names: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Return the settings of a config.json that are fields of ``cls``, renamed by ``names``, with
    lists as tuples.
    """
    settings = {
        names.get(name, name): tuple(value) if isinstance(value, list) else value
        for name, value in config.items()
    }
    return {name: value for name, value in settings.items() if name in cls.__dataclass_fields__}
