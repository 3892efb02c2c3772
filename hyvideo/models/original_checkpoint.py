"""State dicts and settings of original checkpoints of any family, as diffusers' and back.

The functions find the family by the names that they are given. A program that has a model takes its family's
`Component`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hyvideo.models.family import families, family_of_config


def transformer_to_diffusers(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of an original transformer under diffusers' names; ValueError for an unknown name."""
    return _renamed(state_dict, "transformer", "to_diffusers")


def transformer_to_original(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of diffusers' transformer under the original names; ValueError for an unknown name."""
    return _renamed(state_dict, "transformer", "to_original")


def vae_to_diffusers(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of an original VAE under diffusers' names; ValueError for an unknown name."""
    return _renamed(state_dict, "vae", "to_diffusers")


def vae_to_original(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of diffusers' VAE under the original names; ValueError for an unknown name."""
    return _renamed(state_dict, "vae", "to_original")


def transformer_config_to_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of diffusers' class for an original transformer's config.json; ValueError for a bad one."""
    return family_of_config(config, "transformer").transformer.config_to_diffusers(config)


def _renamed(state_dict: Mapping[str, Tensor], part: str, direction: str) -> dict[str, Tensor]:
    reasons = []
    for family in families():
        try:
            return getattr(getattr(family, part), direction)(state_dict)
        except ValueError as error:
            reasons.append(f"{family.name}: {error}")
    raise ValueError("; ".join(reasons))
