"""The shipped recipes that a check runs, and the sizes of their attention and decoding."""

import functools
from dataclasses import dataclass

from hyvideo.models.sizes import Sizes, released_sizes
from hyvideo.models.versions import RELEASED
from hyvideo.settings.command_line import load_config
from hyvideo.settings.config import Config
from tests.conftest import ROOT

TEXT_TOKENS = 300  # of a long prompt


def config_files() -> list[str]:
    """Return the names of all configs, such as paper/table2_a_8gpu.

    The tables in configs/recipes are no configs.
    """
    folder = ROOT / "configs"
    paths = [*folder.glob("*.yaml"), *folder.glob("paper/*.yaml")]
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in paths)


@dataclass(frozen=True)
class Recipe:
    """A config of a released model."""

    name: str
    config: Config
    sizes: Sizes

    @property
    def family(self) -> str:
        return RELEASED[self.config.model.transformer_version].family

    def grid(self, size: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return latent frames, height and width of a video of (frames, height, width)."""
        return self.sizes.latent_size(*size)

    def attention_tokens(self, size: tuple[int, int, int]) -> int:
        """Return the tokens of the blocks' self-attention."""
        text = TEXT_TOKENS if self.sizes.memory.text_in_blocks else 0
        return self.sizes.image_tokens(*size) + text


@functools.cache
def _config(name: str) -> Config:
    return load_config(str(ROOT / "configs" / f"{name}.yaml"))


@functools.cache
def recipe(name: str) -> Recipe:
    config = _config(name)
    return Recipe(name, config, released_sizes(config.model.transformer_version))


def released_recipes() -> list[Recipe]:
    """Return the recipes for released models: all that configs/ has."""
    return [
        recipe(name)
        for name in config_files()
        if _config(name).model.transformer_version in RELEASED
    ]


@dataclass(frozen=True)
class Attention:
    """Self-attention of one sample."""

    heads: int
    head_dim: int
    tokens: int
    is_trained: bool  # it also runs backward


@dataclass(frozen=True)
class Decoding:
    """Decoding of one video."""

    version: str
    dtype: str
    size: tuple[int, int, int]  # frames, height, width
    tile: int  # pixels; 0: whole frames


def attentions() -> dict[str, Attention]:
    """Return the different self-attentions of the recipes, by heads and tokens, such as 16x18318;
    those of validation last.
    """
    found: dict[tuple[int, int, int], bool] = {}
    for kind in ("sampling", "validation_sampling"):
        for each in released_recipes():
            sizes = each.sizes
            tokens = each.attention_tokens(getattr(each.config, kind).size)
            found.setdefault(
                (sizes.num_attention_heads, sizes.attention_head_dim, tokens),
                kind == "sampling",
            )
    return {
        f"{heads}x{tokens}": Attention(heads, head_dim, tokens, is_trained)
        for (heads, head_dim, tokens), is_trained in found.items()
    }


def decodings() -> dict[str, Decoding]:
    """Return the different decodings of the recipes, by family and size; those of
    validation last.
    """
    found: dict[str, Decoding] = {}
    for kind in ("sampling", "validation_sampling"):
        for each in released_recipes():
            model = each.config.model
            size = getattr(each.config, kind).size
            name = f"{each.family} {' x '.join(map(str, size))}"
            found.setdefault(
                name,
                Decoding(model.transformer_version, model.vae_dtype, size, model.vae_tile_size),
            )
    return found
