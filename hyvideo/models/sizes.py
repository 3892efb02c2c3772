"""Sizes of a transformer and its VAE, from their config.json or, without one, of the released version.

Settings are checked against them, so families of this repository are read without torch: their
``sizes.yaml`` has what depends on no file. A family from outside needs no such file, because its
`Family` and the classes of diffusers know the same.

``sizes.yaml`` may also have numbers that were measured for the planner: ``memory`` has the fields of
`BlockMemory`, ``decoding`` those of `DecodingMemory` for each VAE, by its number of latent channels.
"""

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hyvideo.files.files import read_json
from hyvideo.files.text import nearest
from hyvideo.models.config_file import read_config
from hyvideo.models.registry import class_problem, folder_of, is_built_in, module_of, packages
from hyvideo.models.versions import FAMILIES, RELEASED, UNSUPPORTED, version_defaults


@dataclass(frozen=True)
class BlockMemory:
    """Memory of a block per token, in units of the transformer's width, and what else was measured.

    The defaults are those of a block with one attention of image and text and a plain MLP.
    """

    saved: float = (
        12.0  # for the backward pass, except the MLP's hidden layer, which is saved twice
    )
    inference: float = 3.0  # peak without gradients, except the MLP's hidden layer, twice
    inference_at_least: float = 0.0
    backward: float = 3.5  # peak of a backward pass beyond the saved tensors
    backward_mlp: float = 0.0  # hidden layers of the MLP in this peak
    num_attentions: int = 1
    text_in_blocks: bool = True  # text tokens pass through the blocks, beside the video's
    caches_modulation: bool = False  # under a LoRA, see `Family.cache_modulation`
    encoders: float = 0.0  # parameters; 0 if unknown
    encoders_in_groups: float = 0.0  # in blocks: the embedding and two layers
    float32_encoders: float = 0.0  # parameters that stay in float32
    image_encoder: float = 0.0


@dataclass(frozen=True)
class DecodingMemory:
    """Peak number of values while the VAE decodes, per pixel and frame."""

    values: float = 0.0  # 0 if unknown
    gradient_values: float = 0.0  # with a gradient, and its backward pass
    kept_values: float = 0.0  # per latent frame, for the gradient of later ones
    frames_at_once: int = 0  # frames of a latent frame, if one is decoded after another
    # frames and pixels along a side of a token, if all tokens of a tile attend with a mask
    mask_of: tuple[int, int] | None = None

    def bytes(self, videos: int, size: Sequence[int], tile: int, value_bytes: int) -> float:
        """Return the peak bytes of decoding videos (frames, height, width) in tiles, and of the
        videos; 0 if unknown.
        """
        if not self.values:
            return 0.0
        frames, height, width = _tile_size(size, tile)
        values = videos * self.values * self._frames(frames) * height * width
        if self.mask_of:
            of_time, of_side = self.mask_of
            tokens = ((frames - 1) // of_time + 1) * height * width // of_side**2
            values += tokens**2
        # The tiles, and the video into which they are blended.
        return (values + videos * 2 * 3 * math.prod(size)) * value_bytes

    def gradient_bytes(
        self, videos: int, size: Sequence[int], tile: int, value_bytes: int
    ) -> float:
        """Return the peak bytes of decoding videos in tiles with a gradient, and of its backward
        pass; 0 if unknown.
        """
        if not self.gradient_values:
            return 0.0
        frames, height, width = _tile_size(size, tile)
        per_pixel = self.gradient_values
        if self.frames_at_once:
            per_pixel += self.kept_values * ((frames - 1) // self.frames_at_once + 1)
        values = videos * per_pixel * self._frames(frames) * height * width
        # The tiles, the video into which they are blended, and the gradients of both.
        return (values + videos * 4 * 3 * math.prod(size)) * value_bytes

    def _frames(self, frames: int) -> int:
        """Return the frames that are decoded together."""
        return min(frames, self.frames_at_once) if self.frames_at_once else frames


def _tile_size(size: Sequence[int], tile: int) -> tuple[int, int, int]:
    """Return frames, height and width of a tile; a tile of 0 is a whole video."""
    frames, height, width = size
    if not tile:
        return frames, height, width
    return frames, min(tile, height), min(tile, width)


@dataclass(frozen=True)
class Sizes:
    """Sizes that settings depend on, and the arguments that build the models."""

    family: str
    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    patch: tuple[int, int, int]  # frames, height and width of a token, in latents
    out_channels: int  # channels of the latents
    text_width: int  # width of the text encoder's states; 0 without one
    spatial_compression_ratio: int
    temporal_compression_ratio: int
    # whether the text encoder has the width of the released one, whose parameters are known
    has_released_encoders: bool = False
    # settings of diffusers' classes, with _class_name and without defaults
    transformer: Mapping[str, Any] = field(default_factory=dict)
    vae: Mapping[str, Any] = field(default_factory=dict)
    memory: BlockMemory = BlockMemory()
    decoding: DecodingMemory = DecodingMemory()

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

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

    def image_tokens(self, frames: int, height: int, width: int) -> int:
        """Return the number of tokens of a video."""
        return math.prod(
            size // p for size, p in zip(self.latent_size(frames, height, width), self.patch)
        )


def read_architecture(root: str | Path, version: str) -> Sizes:
    """Return the sizes from the transformer's config.json below ``root`` if it exists, else those
    of the release.

    Raises ValueError if the version is unsupported or neither released nor present, or if its
    config.json is corrupted.
    """
    if version in UNSUPPORTED:
        raise ValueError(f"transformer_version {version} is not supported: {UNSUPPORTED[version]}")
    vae = Path(root) / "vae" / "config.json"
    path = _config_file(root, version)
    if path:
        try:
            config = read_config(path.parent, "transformer")
            vae_config = read_json(vae, "VAE") if vae.is_file() else {}
            return read_sizes(_family(config, version), config, vae_config)
        except (OSError, ValueError, TypeError, ArithmeticError, LookupError) as error:
            raise ValueError(
                f"{path} is not the configuration of a known model ({error})"
            ) from error
    if version not in RELEASED:
        names = ", ".join(RELEASED)
        file = Path(root) / "transformer" / version / "config.json"
        hint = nearest(version, RELEASED)
        message = (
            f"transformer_version must be one of {names}, or {file} must exist, got {version!r}"
        )
        raise ValueError(f"{message}; {hint}" if hint else message)
    return released_sizes(version)


def family_of_version(root: str | Path, version: str) -> str:
    """Return the family of a version: by its config.json below ``root``, otherwise the listed
    one; empty if neither is known.
    """
    path = _config_file(root, version)
    if path:
        return _family(read_json(path, "transformer"), version)
    return version_defaults(version).family


def released_sizes(version: str) -> Sizes:
    """Return the sizes of a released version."""
    family = RELEASED[version].family
    changes = _table(family).get("versions", {}).get(version, {})
    return _sizes(family, changes.get("transformer", {}), changes.get("vae", {}))


def versions_of_sizes(family: str, transformer: Mapping[str, Any]) -> list[str]:
    """Return the released versions of a family whose transformer has the arguments of a config.json,
    as far as ``sizes.yaml`` lists them.
    """
    table = _table(family)
    names = [name for name, version in RELEASED.items() if version.family == family]
    if "transformer" not in table:
        return []
    config = _with_diffusers_names(family, "transformer", transformer)

    def has_arguments_of(name: str) -> bool:
        changes = table["versions"].get(name, {}).get("transformer", {})
        released = table["transformer"] | changes
        return all(config.get(key, value) == value for key, value in released.items())

    return [name for name in names if has_arguments_of(name)]


def read_sizes(family: str, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> Sizes:
    """Return the sizes in config.json files with diffusers' names or the original's.

    ``vae`` may be empty. Raises an error of any kind for settings that are missing or wrong.
    """
    transformer = _with_diffusers_names(family, "transformer", transformer)
    if not vae:
        vae = _table(family).get("vae_of_channels", {}).get(transformer.get("out_channels"), {})
    if vae:
        vae = _with_diffusers_names(family, "vae", vae)
    sizes = _sizes(family, transformer, vae)
    # Raises for settings of the wrong type.
    assert sizes.num_layers * sizes.width and sizes.latent_size(1, 0, 0)
    return sizes


def decoding_memory(family: str, channels: int) -> DecodingMemory:
    """Return what was measured of a family's VAE with this number of latent channels, or else of its
    first VAE.
    """
    measured = _table(family).get("decoding", {})
    if not measured:
        return DecodingMemory()
    return DecodingMemory(**measured.get(channels, next(iter(measured.values()))))


def tiny_module(family: str):
    """Import the ``tiny`` module of a family, whose ``write`` makes a checkpoint of minimal width
    for a rehearsal.
    """
    return module_of(family, "tiny")


def _config_file(root: str | Path, version: str) -> Path | None:
    folder = Path(root) / "transformer"
    folders = folder / version, folder, Path(root) / "high_noise_model"
    paths = [each / "config.json" for each in folders]
    return next((path for path in paths if path.is_file()), None)


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


@functools.cache
def _table(family: str) -> dict[str, Any]:
    """Return the ``sizes.yaml`` of a family; empty without one."""
    path = folder_of(family) / "sizes.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _with_diffusers_names(family: str, part: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a ``transformer`` or ``vae`` with the names of diffusers' class."""
    if not is_built_in(family):
        return config
    if config.get("_class_name") in _table(family)["classes"]:
        return config
    return getattr(module_of(family, "settings"), f"{part}_config_to_diffusers")(config)


def _sizes(family: str, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> Sizes:
    """Return the sizes for settings of diffusers' classes, which may be incomplete."""
    table = _table(family)
    if is_built_in(family):
        full = table["transformer"] | dict(transformer)
        full_vae = table["vae"] | dict(vae)
        patch = _patch(full)
        spatial = full_vae.get("spatial_compression_ratio") or full_vae["scale_factor_spatial"]
        temporal = full_vae.get("temporal_compression_ratio") or full_vae["scale_factor_temporal"]
        channels = full["out_channels"]
        released_width = _text_width(table["transformer"])
    else:
        full, full_vae, known = _settings_of_outside(family, transformer, vae)
        patch = known.patch(full)
        latents = known.latents(full_vae)
        channels, temporal, spatial = latents[:3]
        released_width = _text_width(_settings_of_outside(family, {}, {})[0])
    heads, head_dim = _heads(full)
    return Sizes(
        family=family,
        num_layers=full["num_layers"],
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        patch=tuple(patch),
        out_channels=channels,
        text_width=_text_width(full),
        spatial_compression_ratio=spatial,
        temporal_compression_ratio=temporal,
        has_released_encoders=_text_width(full) == released_width,
        transformer={"_class_name": full["_class_name"]} | dict(transformer),
        vae=dict(vae),
        memory=BlockMemory(**table.get("memory", {})),
        decoding=decoding_memory(family, channels),
    )


def _settings_of_outside(family: str, transformer: Mapping, vae: Mapping) -> tuple[dict, dict, Any]:
    """Return the complete settings of a family from outside, with the defaults of its classes, and
    its `Family`.
    """
    from hyvideo.models.family import family_named, model_class

    known = family_named(family)
    component = known.transformer_of(str(transformer.get("_class_name", "")))
    complete = []
    for each, settings in ((component, transformer), (known.vae, vae)):
        parameters = inspect.signature(model_class(each)).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        complete.append({"_class_name": each.class_name} | defaults | dict(settings))
    _check_keys(complete[0])
    return *complete, known


def _check_keys(config: Mapping[str, Any]) -> None:
    """Raise ValueError if the transformer's class has no argument of a size that is read."""
    width = ["num_attention_heads", "attention_head_dim"]
    if "num_attention_heads" not in config:
        width = ["hidden_size"]
    missing = [key for key in ("num_layers", *width) if key not in config]
    if missing:
        raise ValueError(
            f"{config['_class_name']} has no argument {' and no '.join(missing)}. It needs "
            "num_layers, and num_attention_heads and attention_head_dim or, without attention, "
            "hidden_size, the width of a token"
        )


def _patch(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return frames, height and width of a token."""
    size = config["patch_size"]
    if isinstance(size, int):
        return config["patch_size_t"], size, size
    return tuple(size)


def _heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of attention heads and the width of a head; a model without attention has
    one, which is as wide as a token.
    """
    if "num_attention_heads" in config:
        return config["num_attention_heads"], config["attention_head_dim"]
    return 1, config["hidden_size"]


def _text_width(config: Mapping[str, Any]) -> int:
    """Return the width of the text encoder's states, 0 for a family without text."""
    return config.get("text_embed_dim") or config.get("text_dim", 0)
