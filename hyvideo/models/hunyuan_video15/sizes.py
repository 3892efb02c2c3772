"""Sizes of a transformer and its VAE, from a config.json or as released: enough to count parameters, bytes and FLOPs.

Pure arithmetic; the parameter count is the model's own, to the last one (tested against the class).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyvideo.data.outside import parse_json
from hyvideo.models.hunyuan_video15.settings import transformer_config_to_diffusers, vae_config_to_diffusers
from hyvideo.models.versions import RELEASED, UNSUPPORTED

_TIME_DIM = 256  # sinusoidal embedding of a timestep
_GLYPH_HIDDEN = 2048  # of the ByT5 projection, whatever the width of the model


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model by diffusers' names; the defaults are those of the released 480p and 720p models."""

    num_layers: int = 54  # double blocks
    num_refiner_layers: int = 2
    num_attention_heads: int = 16
    attention_head_dim: int = 128
    mlp_ratio: float = 4.0
    patch_size: int = 1
    patch_size_t: int = 1
    in_channels: int = 65  # noisy latents, condition latents, mask
    out_channels: int = 32
    text_embed_dim: int = 3584
    text_embed_2_dim: int = 1472
    image_embed_dim: int = 1152
    use_meanflow: bool = False
    # of the VAE
    spatial_compression_ratio: int = 16
    temporal_compression_ratio: int = 4
    block_out_channels: tuple[int, ...] = (128, 256, 512, 1024, 1024)

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def hidden(self) -> int:
        """Width of the MLP's hidden layer."""
        return int(self.mlp_ratio * self.width)

    @property
    def block_parameters(self) -> int:
        """Parameters of a double block: modulation, attention and MLP for image and text, and four norms of a head."""
        d = self.width
        return 2 * (_linear(d, 6 * d) + 4 * _linear(d, d) + self._mlp) + 4 * self.attention_head_dim

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: embedders, text refiner, output."""
        d, text_dim, glyph_dim, image_dim = self.width, self.text_embed_dim, self.text_embed_2_dim, self.image_embed_dim
        time = _linear(_TIME_DIM, d) + _linear(d, d)
        refiner_block = 2 * 2 * d + 4 * _linear(d, d) + self._mlp + _linear(d, 2 * d)
        text = _linear(text_dim, d) + time + _linear(text_dim, d) + _linear(d, d)
        glyph = 2 * glyph_dim + _linear(glyph_dim, _GLYPH_HIDDEN)
        glyph += _linear(_GLYPH_HIDDEN, _GLYPH_HIDDEN) + _linear(_GLYPH_HIDDEN, d)
        image = 2 * image_dim + _linear(image_dim, image_dim) + _linear(image_dim, d) + 2 * d
        patch = self.patch_size_t * self.patch_size**2
        ends = _linear(self.in_channels * patch, d) + _linear(d, 2 * d) + _linear(d, self.out_channels * patch)
        kinds, times = 3 * d, time * (1 + self.use_meanflow)
        return text + self.num_refiner_layers * refiner_block + glyph + image + ends + kinds + times

    @property
    def parameters(self) -> int:
        return self.num_layers * self.block_parameters + self.root_parameters

    @property
    def token_parameters(self) -> int:
        """Parameters of a block that every token of a stream is multiplied with: no modulation, norms or biases."""
        return 4 * self.width**2 + 2 * self.hidden * self.width

    def lora_parameters(self, rank: int) -> int:
        """Parameters of an adapter on attention and MLP of both streams, but for the dead end of the last block's
        text (``lora.training_config``)."""
        d = self.width
        mlp = 2 * (d + self.hidden)
        return rank * (2 * self.num_layers * (8 * d + mlp) - 2 * d - mlp)

    @property
    def is_released(self) -> bool:
        """Claims that the encoders, whose size is known for the released models only, are theirs."""
        return self.text_embed_dim == Architecture.text_embed_dim and self.width == Architecture().width

    def latent_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Frames, height and width of a video's latents. Raises ValueError for a size that the model cannot make."""
        ratio = self.spatial_compression_ratio
        for name, pixels in (("height", height), ("width", width)):
            if pixels % (ratio * self.patch_size):
                raise ValueError(f"{name} must be a multiple of {ratio * self.patch_size}, got {pixels}")
        return (frames - 1) // self.temporal_compression_ratio + 1, height // ratio, width // ratio

    def image_tokens(self, frames: int, height: int, width: int) -> int:
        frames, height, width = self.latent_size(frames, height, width)
        return (frames // self.patch_size_t) * (height // self.patch_size) * (width // self.patch_size)

    @property
    def _mlp(self) -> int:
        return _linear(self.width, self.hidden) + _linear(self.hidden, self.width)


def _linear(inputs: int, outputs: int) -> int:
    """Parameters of a linear layer with bias."""
    return (inputs + 1) * outputs


def read_architecture(root: str | Path, version: str) -> Architecture:
    """The architecture of ``root/transformer/<version>`` where its config.json is there, else the released one.

    Raises:
        ValueError: The version is neither released nor there, cannot be used, or its config.json is damaged.
    """
    if version in UNSUPPORTED:
        raise ValueError(f"transformer_version {version} cannot be used: {UNSUPPORTED[version]}")
    folder, vae = Path(root) / "transformer", Path(root) / "vae" / "config.json"
    for path in (folder / version / "config.json", folder / "config.json"):
        if path.is_file():
            sizes = _read(path, "HunyuanVideo15Transformer3DModel", transformer_config_to_diffusers)
            of_vae = _read(vae, "AutoencoderKLHunyuanVideo15", vae_config_to_diffusers) if vae.is_file() else {}
            return Architecture(**(of_vae | sizes))  # channels are the transformer's
    if version not in RELEASED:
        raise ValueError(
            f"transformer_version must be one of {', '.join(RELEASED)} or have {folder / version / 'config.json'}, "
            f"got {version!r}"
        )
    return Architecture(use_meanflow=RELEASED[version].kind == "step_distilled")


def _read(path: Path, class_name: str, to_diffusers: Callable[[dict], dict[str, Any]]) -> dict[str, Any]:
    """The sizes in a config.json, which has diffusers' names if it names diffusers' class, else the original's."""
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it must hold a JSON object, got {type(config).__name__}")
        config = config if config.get("_class_name") == class_name else to_diffusers(config)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no configuration of HunyuanVideo-1.5 ({error})") from error
    return {name: value for name, value in config.items() if name in Architecture.__dataclass_fields__}
