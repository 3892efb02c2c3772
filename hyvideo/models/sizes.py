"""Sizes of a transformer and its VAE, from a config.json or as released: enough to count parameters, bytes and FLOPs.

Pure arithmetic, without torch. A family has its own in ``<family>/sizes.py``: ``read``, of the settings of a
transformer and a VAE, and ``released``, of a version.
"""

import functools
import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hyvideo.data.outside import parse_json
from hyvideo.models.versions import RELEASED, UNSUPPORTED, version_defaults


@dataclass(frozen=True)
class Forward:
    """FLOPs of one evaluation of the transformer for one video and one branch."""

    image: float  # linear layers on image tokens
    text: float  # linear layers on text tokens, repeated on every rank of a sequence-parallel group
    attention: float

    @property
    def total(self) -> float:
        return self.image + self.text + self.attention

    def of_rank(self, sp_size: int) -> float:
        """FLOPs of a rank of a sequence-parallel group."""
        return (self.image + self.attention) / sp_size + self.text


class Sizes:
    """Sizes of a transformer and its VAE: the base of a family's frozen dataclass, which has these names as fields,
    properties, constants or methods. Widths count tensors of the transformer's width, for every token.
    """

    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    mlp_ratio: float  # width of the MLP's hidden layer over the width
    patch: tuple[int, int, int]  # frames, height and width of a token in latents
    out_channels: int  # of the latents
    text_width: int  # of the text encoder's states
    is_released: bool  # the encoders, whose size is known for the released models only, are theirs
    spatial_compression_ratio: int
    temporal_compression_ratio: int
    block_parameters: int
    root_parameters: int  # outside the blocks
    matrix_parameters: int  # of the blocks' matrices: Muon's
    num_attentions: int  # of a block
    fixed_widths: float  # that a block keeps for its backward pass beside the MLP's hidden layer, which is kept twice
    inference_widths: float  # that a block holds at most without gradient
    backward_widths: float  # that a block's backward pass holds beside what is kept
    vae_parameters: float
    decode_flops: float  # for each pixel and frame

    lora_parameters: Callable[[int], int]  # of an adapter of this rank on every matrix of the blocks with a gradient
    block_text_tokens: Callable[[int], int]  # that go through the blocks beside the video's, for a prompt of so many
    forward: Callable[[int, int], Forward]  # of so many image and text tokens
    encoder_bytes: Callable[..., float]  # of the released encoders: (size of a number, *, with_images)
    # (videos, frames, height, width): numbers that decoding tiles of this size holds at most, without the videos
    decoding_values: Callable[[int, int, int, int], float]

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
    def kept_widths(self) -> float:
        """Widths that a block keeps of every token for its backward pass."""
        return self.fixed_widths + 2 * self.mlp_ratio

    def latent_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Frames, height and width of a video's latents. Raises ValueError for a size that the model cannot make."""
        ratio = self.spatial_compression_ratio
        for name, pixels, patch in (("height", height, self.patch[1]), ("width", width, self.patch[2])):
            if pixels % (ratio * patch):
                raise ValueError(f"{name} must be a multiple of {ratio * patch}, got {pixels}")
        return (frames - 1) // self.temporal_compression_ratio + 1, height // ratio, width // ratio

    def image_tokens(self, frames: int, height: int, width: int) -> int:
        """Tokens of a video."""
        return math.prod(size // p for size, p in zip(self.latent_size(frames, height, width), self.patch))


def linear(inputs: int, outputs: int) -> int:
    """Parameters of a linear layer with bias."""
    return (inputs + 1) * outputs


@functools.cache
def packages() -> dict[str, str]:
    """Return the package of every family by the class names of its models."""
    found: dict[str, str] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.ispkg:
            package = importlib.import_module(f"hyvideo.models.{module.name}")
            found |= dict.fromkeys(getattr(package, "CLASS_NAMES", ()), module.name)
    return found


def read_architecture(root: str | Path, version: str) -> Sizes:
    """Return the sizes of ``root/transformer/<version>`` where its config.json is there, else the released ones.

    Raises:
        ValueError: The version is neither released nor there, cannot be used, or its config.json is damaged.
    """
    if version in UNSUPPORTED:
        raise ValueError(f"transformer_version {version} cannot be used: {UNSUPPORTED[version]}")
    folder, vae = Path(root) / "transformer", Path(root) / "vae" / "config.json"
    for path in (folder / version / "config.json", folder / "config.json"):
        if path.is_file():
            try:
                config, of_vae = _read(path), _read(vae) if vae.is_file() else {}
                named = packages().get(str(config.get("_class_name"))) or version_defaults(version).family
                sizes = sizes_module(named).read(config, of_vae)
                # Settings of another type raise here.
                assert sizes.parameters and sizes.kept_widths and sizes.latent_size(1, 0, 0)
                return sizes
            except (OSError, ValueError, TypeError, ArithmeticError, LookupError) as error:
                raise ValueError(f"{path} is not the configuration of a known model ({error})") from error
    if version not in RELEASED:
        raise ValueError(
            f"transformer_version must be one of {', '.join(RELEASED)} or have {folder / version / 'config.json'}, "
            f"got {version!r}"
        )
    return sizes_module(RELEASED[version].family).released(version)


def sizes_module(package: str) -> ModuleType:
    """Return the sizes of a family: a module with ``read`` and ``released``."""
    return importlib.import_module(f"hyvideo.models.{package}.sizes")


def _read(path: Path) -> dict[str, Any]:
    config = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"it must hold a JSON object, got {type(config).__name__}")
    return config


def fields_of(cls: type, config: Mapping[str, Any], names: Mapping[str, str] = {}) -> dict[str, Any]:
    """Return the settings of a config.json that are fields of a dataclass of sizes, lists as tuples.

    ``names`` are those of the fields that have other ones than their settings.
    """
    settings = {
        names.get(name, name): tuple(value) if isinstance(value, list) else value for name, value in config.items()
    }
    return {name: value for name, value in settings.items() if name in cls.__dataclass_fields__}
