"""The names of the original Wan transformer's tensors, mapped to diffusers' and back; all numbers stay as they are."""

from collections.abc import Mapping

from torch import Tensor

from hyvideo.models.names import both_directions, rename
from hyvideo.models.wan.settings import NAMES

_TO_DIFFUSERS, _TO_ORIGINAL = both_directions(NAMES, "transformer")


def transformer_to_diffusers(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of the original transformer under diffusers' names; ValueError for an unknown name."""
    return rename(state_dict, _TO_DIFFUSERS, "an original Wan transformer")


def transformer_to_original(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of diffusers' transformer under the original names; ValueError for an unknown name."""
    return rename(state_dict, _TO_ORIGINAL, "a diffusers Wan transformer")
