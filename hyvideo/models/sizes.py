"""Sizes of a transformer and its VAE, from a config.json or as released: enough to count parameters, bytes and FLOPs.

Pure arithmetic, without torch. A family has its own in ``<family>/sizes.py``: ``read``, of the settings of a
transformer and a VAE, and ``released``, of a version.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

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


class Sizes(Protocol):
    """Sizes of a transformer and its VAE that the planner needs; widths count tensors of the transformer's width."""

    num_layers: int
    num_attention_heads: int
    width: int
    mlp_ratio: float  # width of the MLP's hidden layer over the width
    kept_widths: float  # that a block keeps of every token for its backward pass
    inference_widths: float  # that a block holds at most without gradient
    backward_widths: float  # that a block's backward pass holds beside what is kept
    num_attentions: int  # of a block
    text_width: int  # of the text encoder's states
    out_channels: int  # of the latents
    spatial_compression_ratio: int
    parameters: int
    block_parameters: int
    root_parameters: int  # outside the blocks
    matrix_parameters: int  # of the blocks' matrices: Muon's
    is_released: bool  # the encoders, whose size is known for the released models only, are theirs
    vae_parameters: float
    decode_flops: float  # for each pixel and frame

    def lora_parameters(self, rank: int) -> int:
        """Parameters of an adapter on every matrix of the blocks with a gradient."""

    def latent_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Frames, height and width of a video's latents. Raises ValueError for a size that the model cannot make."""

    def image_tokens(self, frames: int, height: int, width: int) -> int:
        """Tokens of a video."""

    def block_text_tokens(self, text_tokens: int) -> int:
        """Text tokens that go through the blocks beside the video's, for a prompt of so many."""

    def forward(self, image_tokens: int, text_tokens: int) -> Forward:
        """FLOPs of one forward over so many tokens."""

    def encoder_bytes(self, size: int, *, with_images: bool) -> float:
        """Bytes of the released encoders, ``size`` bytes a number."""

    def decoding_values(self, videos: int, frames: int, height: int, width: int) -> float:
        """Numbers that decoding tiles of this size of so many videos holds at most, without the videos."""


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
            config = _read(path)
            of_vae = _read(vae) if vae.is_file() else {}
            named = packages().get(str(config.get("_class_name"))) or version_defaults(version).family
            return _understood(sizes_module(named).read, config, of_vae, path)
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
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it must hold a JSON object, got {type(config).__name__}")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not the configuration of a known model ({error})") from error
    return config


def _understood(read: Callable[..., Sizes], config: Mapping, vae: Mapping, path: Path) -> Sizes:
    try:
        return read(config, vae)
    except ValueError as error:
        raise ValueError(f"{path} is not the configuration of a known model ({error})") from error
