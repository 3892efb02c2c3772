"""Sizes of a transformer and its VAE, from a config.json or as released: enough to count parameters, bytes and FLOPs.

Pure arithmetic; the parameter count is the model's own, to the last one (tested against the class).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyvideo.data.outside import parse_json
from hyvideo.models.versions import RELEASED, UNSUPPORTED

_TIME_DIM = 256  # sinusoidal embedding of a timestep
_GLYPH_HIDDEN = 2048  # of the ByT5 projection, whatever the width of the model


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model; the defaults are those of the released 480p and 720p models."""

    num_layers: int = 54  # double blocks
    num_refiner_layers: int = 2
    width: int = 2048
    num_heads: int = 16
    mlp_ratio: int = 4
    patch: tuple[int, int, int] = (1, 1, 1)  # frames, height, width
    in_channels: int = 65  # noisy latents, condition latents, mask
    latent_channels: int = 32
    text_dim: int = 3584
    glyph_dim: int = 1472
    image_dim: int = 1152
    use_meanflow: bool = False
    vae_spatial: int = 16
    vae_temporal: int = 4
    vae_channels: tuple[int, ...] = (128, 256, 512, 1024, 1024)

    @property
    def block_parameters(self) -> int:
        """Parameters of a double block: modulation, attention and MLP for image and text, and four norms of a head."""
        d, hidden = self.width, self.mlp_ratio * self.width
        modulation = linear(d, 6 * d)
        attention = 4 * linear(d, d)
        return 2 * (modulation + attention + self._mlp(d, hidden)) + 4 * (d // self.num_heads)

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: embedders, text refiner, output."""
        d = self.width
        time = linear(_TIME_DIM, d) + linear(d, d)
        refiner_block = 2 * 2 * d + 4 * linear(d, d) + self._mlp(d, self.mlp_ratio * d) + linear(d, 2 * d)
        text = linear(self.text_dim, d) + time + linear(self.text_dim, d) + linear(d, d)
        glyph = 2 * self.glyph_dim + linear(self.glyph_dim, _GLYPH_HIDDEN)
        glyph += linear(_GLYPH_HIDDEN, _GLYPH_HIDDEN) + linear(_GLYPH_HIDDEN, d)
        image = 2 * self.image_dim + linear(self.image_dim, self.image_dim) + linear(self.image_dim, d) + 2 * d
        patch = self.patch[0] * self.patch[1] * self.patch[2]
        ends = linear(self.in_channels * patch, d) + linear(d, 2 * d) + linear(d, self.latent_channels * patch)
        kinds = 3 * d
        times = 2 * time if self.use_meanflow else time
        return text + self.num_refiner_layers * refiner_block + glyph + image + ends + kinds + times

    @property
    def parameters(self) -> int:
        return self.num_layers * self.block_parameters + self.root_parameters

    @property
    def token_parameters(self) -> int:
        """Parameters of a block that every token of a stream is multiplied with: no modulation, norms or biases."""
        return 4 * self.width**2 + 2 * self.mlp_ratio * self.width**2

    def lora_parameters(self, rank: int) -> int:
        """Parameters of an adapter on attention and MLP of both streams, but for the dead end of the last block's
        text (``lora.training_config``)."""
        d, hidden = self.width, self.mlp_ratio * self.width
        mlp = 2 * (d + hidden)
        per_stream = 4 * (d + d) + mlp
        return rank * (2 * self.num_layers * per_stream - (d + d) - mlp)

    @property
    def is_released(self) -> bool:
        """Claims that the encoders, whose size is known for the released models only, are theirs."""
        return self.text_dim == Architecture.text_dim and self.width == Architecture.width

    def latent_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Frames, height and width of a video's latents. Raises ValueError for a size that the model cannot make."""
        for name, pixels, patch in (("height", height, self.patch[1]), ("width", width, self.patch[2])):
            step = self.vae_spatial * patch
            if pixels % step:
                raise ValueError(f"{name} must be a multiple of {step}, got {pixels}")
        return (frames - 1) // self.vae_temporal + 1, height // self.vae_spatial, width // self.vae_spatial

    def image_tokens(self, frames: int, height: int, width: int) -> int:
        tokens = 1
        for size, patch in zip(self.latent_size(frames, height, width), self.patch):
            tokens *= size // patch
        return tokens

    @staticmethod
    def _mlp(width: int, hidden: int) -> int:
        return linear(width, hidden) + linear(hidden, width)


def linear(inputs: int, outputs: int) -> int:
    """Parameters of a linear layer with bias."""
    return (inputs + 1) * outputs


def read_architecture(root: str | Path, version: str) -> Architecture:
    """The architecture of ``root/transformer/<version>`` where its config.json is there, else the released one.

    Raises:
        ValueError: The version is neither released nor there, cannot be used, or its config.json is damaged.
    """
    if version in UNSUPPORTED:
        raise ValueError(f"transformer_version {version} cannot be used: {UNSUPPORTED[version]}")
    folder = Path(root) / "transformer"
    for path in (folder / version / "config.json", folder / "config.json"):
        if path.is_file():
            return _of_configs(path, Path(root) / "vae" / "config.json")
    if version not in RELEASED:
        raise ValueError(
            f"transformer_version must be one of {', '.join(RELEASED)} or have {folder / version / 'config.json'}, "
            f"got {version!r}"
        )
    return Architecture(use_meanflow=RELEASED[version].kind == "step_distilled")


def _of_configs(transformer: Path, vae: Path) -> Architecture:
    latents = _vae_sizes(_read(vae)) if vae.is_file() else {}
    config = _read(transformer)
    is_original = "mm_double_blocks_depth" in config
    try:
        sizes = _original_sizes(config) if is_original else _diffusers_sizes(config)
        return Architecture(**(latents | sizes))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{transformer} is no configuration of a HunyuanVideo-1.5 transformer ({error})") from error


def _original_sizes(config: dict[str, Any]) -> dict[str, Any]:
    latent = config["in_channels"]
    return {
        "num_layers": config["mm_double_blocks_depth"],
        "width": config["hidden_size"],
        "num_heads": config["heads_num"],
        "mlp_ratio": int(config["mlp_width_ratio"]),
        "patch": tuple(config["patch_size"]),
        "in_channels": 2 * latent + 1 if config.get("concat_condition", True) else latent,
        "latent_channels": config["out_channels"],
        "text_dim": config["text_states_dim"],
        "image_dim": config["vision_states_dim"],
        "use_meanflow": config.get("use_meanflow", False),
    }


def _diffusers_sizes(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": config["num_layers"],
        "num_refiner_layers": config["num_refiner_layers"],
        "width": config["num_attention_heads"] * config["attention_head_dim"],
        "num_heads": config["num_attention_heads"],
        "mlp_ratio": int(config["mlp_ratio"]),
        "patch": (config["patch_size_t"], config["patch_size"], config["patch_size"]),
        "in_channels": config["in_channels"],
        "latent_channels": config["out_channels"],
        "text_dim": config["text_embed_dim"],
        "glyph_dim": config["text_embed_2_dim"],
        "image_dim": config["image_embed_dim"],
        "use_meanflow": config.get("use_meanflow", False),
    }


def _vae_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes from a config.json of either layout; what the file leaves out is as released."""
    names = {
        "ffactor_spatial": "vae_spatial",
        "spatial_compression_ratio": "vae_spatial",
        "ffactor_temporal": "vae_temporal",
        "temporal_compression_ratio": "vae_temporal",
    }
    sizes = {names[name]: value for name, value in config.items() if name in names}
    return sizes | ({"vae_channels": tuple(config["block_out_channels"])} if "block_out_channels" in config else {})


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no readable JSON file ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
