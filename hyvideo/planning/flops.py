"""Parameters and FLOPs of the models, from the table ``counts.json``, or counted on models without
weights if the table lacks them.

The numbers of products and of operations of attention are polynomials of the numbers of image and
text tokens, so the table has their coefficients and is right for a video of any size. It has them
for one block and for each further one, so it is right for any number of blocks, too. The table is
computed by `counting`, which imports torch; this file does not.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hyvideo.files.files import read_json
from hyvideo.models.sizes import Sizes

TABLE = Path(__file__).with_name("counts.json")


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a transformer and its VAE."""

    total: int
    block: int
    matrices: int  # of the blocks, which Muon trains and fp8 rounds
    largest_matrix: int
    modulation: int  # layers of the blocks outside of these matrices, whose input is the timestep
    num_modulations: int  # such layers
    per_lora_rank: int  # of an adapter of rank 1
    vae: int
    is_flow_map: bool  # a flow map: its forward pass also reads where a step ends
    num_blocks: int

    @property
    def root(self) -> int:
        """Parameters outside the blocks."""
        return self.total - self.block * self.num_blocks


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass for one video and one guidance branch."""

    products: float  # matrix products outside attention
    attention: float

    @property
    def total(self) -> float:
        return self.products + self.attention


def count_parameters(sizes: Sizes, lora_targets: tuple[str, ...] = ()) -> Parameters:
    """Return the parameters of a model, and of a LoRA on ``lora_targets`` or all matrices."""
    known = _table()["parameters"].get(parameters_key(sizes, lora_targets))
    if known:
        return Parameters(**known)
    from hyvideo.planning import counting

    return counting.count_parameters(sizes, lora_targets)


def count_flops(sizes: Sizes, size: tuple[int, int, int], text_tokens: int) -> Flops:
    """Return the FLOPs of a forward pass for a video (frames, height, width) and its prompt."""
    return flops_of_latents(sizes, sizes.latent_size(*size), text_tokens)


def flops_of_latents(sizes: Sizes, grid: tuple[int, int, int], text_tokens: int) -> Flops:
    """Return the FLOPs of a forward pass for latents (frames, height, width) and a prompt."""
    known = _table()["forward"].get(forward_key(sizes))
    if known:
        tokens = math.prod(side // patch for side, patch in zip(grid, sizes.patch))
        one_block, further = (
            Flops(
                products=polynomial(known[part]["products"], tokens, text_tokens),
                attention=polynomial(known[part]["attention"], tokens, text_tokens),
            )
            for part in ("one_block", "further_block")
        )
        return with_blocks(one_block, further, sizes.num_layers)
    from hyvideo.planning import counting

    return counting.flops_of_latents(sizes, grid, text_tokens)


def with_blocks(one_block: Flops, further: Flops, num_blocks: int) -> Flops:
    """Return the FLOPs of a model with ``num_blocks`` blocks, from those of a model with one block
    and of each further block.
    """
    return Flops(
        products=one_block.products + (num_blocks - 1) * further.products,
        attention=one_block.attention + (num_blocks - 1) * further.attention,
    )


def count_decoding(sizes: Sizes) -> float:
    """Return the FLOPs of decoding per pixel and frame."""
    known = _table()["decoding"].get(decoding_key(sizes))
    if known:
        return known["per_pixel"]
    from hyvideo.planning import counting

    return counting.count_decoding(sizes)


def polynomial(coefficients: Sequence[int], image: int, text: int) -> int:
    """Return the value for numbers of image and text tokens; coefficients of 1, image, text,
    image^2, image text, text^2.
    """
    terms = (1, image, text, image * image, image * text, text * text)
    return sum(factor * term for factor, term in zip(coefficients, terms, strict=True))


@cache
def _table() -> dict[str, dict[str, Any]]:
    return read_json(TABLE, "counts")


def parameters_key(sizes: Sizes, lora_targets: Sequence[str]) -> str:
    return _digest(sizes.family, sizes.transformer, sizes.vae, list(lora_targets))


def forward_key(sizes: Sizes) -> str:
    """Return the key of models that differ in their number of blocks at most."""
    transformer = {name: value for name, value in sizes.transformer.items() if name != "num_layers"}
    return _digest(sizes.family, transformer, sizes.out_channels, sizes.text_width)


def decoding_key(sizes: Sizes) -> str:
    return _digest(sizes.family, sizes.vae, sizes.out_channels)


def _digest(*values: str | int | Sequence[str] | Mapping[str, Any]) -> str:
    """Return the key of a model in the table: 8 bytes of blake2b of the arguments of its classes."""
    plain = [dict(value) if isinstance(value, Mapping) else value for value in values]
    text = json.dumps(plain, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
