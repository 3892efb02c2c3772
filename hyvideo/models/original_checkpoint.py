"""Conversion of state dicts and settings between diffusers and the original checkpoints of any
family.

Each function infers the family from the names in its argument; of a known model, use the family's
`Component`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from hyvideo.models.family import Family, families, family_of_config


def renamed_by_family(
    part: str, direction: str, rows: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Family]:
    """Rename tensors of a ``transformer`` or ``vae`` (``to_diffusers``, ``to_original``); also
    return their family.
    """
    reasons = []
    for family in families():
        convert = getattr(getattr(family, part), direction)
        if convert is dict:  # only diffusers' layout is supported, and dict would accept any tensor
            continue
        try:
            return convert(rows), family
        except ValueError as error:
            reasons.append(f"{family.name}: {error}")
    raise ValueError("; ".join(reasons))


def _renamed(part: str, direction: str, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return renamed_by_family(part, direction, state_dict)[0]


transformer_to_diffusers = partial(_renamed, "transformer", "to_diffusers")
transformer_to_original = partial(_renamed, "transformer", "to_original")
vae_to_diffusers = partial(_renamed, "vae", "to_diffusers")
vae_to_original = partial(_renamed, "vae", "to_original")


def transformer_config_to_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of diffusers' class from an original transformer's config.json."""
    return family_of_config(config).transformer.config_to_diffusers(config)
