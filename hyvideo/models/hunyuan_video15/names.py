"""Conversion of tensor names between original HunyuanVideo-1.5 checkpoints and diffusers.

Most tensors differ only in name, according to ``names.yaml``. Two also differ in layout:

- the text refiner's fused ``self_attn_qkv`` is three matrices in diffusers, with rows in the order
  q, k, v;
- the last modulation, ``final_layer.adaLN_modulation.1``, returns (shift, scale), but diffusers'
  ``norm_out.linear`` returns (scale, shift): the two halves of the rows are swapped.

Both conversions are exact and round-trip bit for bit. An unknown name raises ValueError and is
never skipped.
"""

import re
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from hyvideo.models.hunyuan_video15.settings import NAMES
from hyvideo.models.names import both_directions, with_dots

_to_diffusers, _to_original = both_directions(NAMES, "transformer", "transformer")
module_with_dots = partial(with_dots, NAMES, "transformer")
vae_to_diffusers, vae_to_original = both_directions(NAMES, "vae", "VAE")


def transformer_to_diffusers(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of the original transformer to diffusers' names.

    Raises ValueError for unknown names.
    """
    return _swap_final_modulation(_split_refiner_qkv(_to_diffusers(state_dict)), "norm_out.linear.")


def transformer_to_original(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of diffusers' transformer to the original names and layout, the exact
    inverse.

    Raises ValueError for unknown names, such as those of a LoRA adapter, which must be merged
    first.
    """
    return _swap_final_modulation(
        _to_original(_fuse_refiner_qkv(state_dict)), "final_layer.adaLN_modulation.1."
    )


_FUSED = re.compile(
    r"(context_embedder\.token_refiner\.refiner_blocks\.\d+\.attn)\.to_qkv\.(weight|bias)"
)
_SPLIT = re.compile(
    r"(context_embedder\.token_refiner\.refiner_blocks\.\d+\.attn)\.to_[qkv]\.(weight|bias)"
)


def _split_refiner_qkv(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace each fused ``to_qkv`` (3 * dim, ...) with ``to_q``, ``to_k`` and ``to_v`` of shape
    (dim, ...).
    """
    split = {}
    for name, tensor in state_dict.items():
        match = _FUSED.fullmatch(name)
        if match:
            for part, rows in zip("qkv", _row_chunks(name, tensor, 3)):
                # Cloned, so that the three parameters are not views of one tensor.
                split[f"{match[1]}.to_{part}.{match[2]}"] = rows.clone()
        else:
            split[name] = tensor
    return split


def _fuse_refiner_qkv(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace ``to_q``, ``to_k`` and ``to_v`` of each refiner block with one ``to_qkv`` (3 * dim,
    ...).
    """
    fused = {}
    for name, tensor in state_dict.items():
        match = _SPLIT.fullmatch(name)
        if not match:
            fused[name] = tensor
            continue
        fused_name = f"{match[1]}.to_qkv.{match[2]}"
        if fused_name in fused:
            continue
        parts = [f"{match[1]}.to_{part}.{match[2]}" for part in "qkv"]
        missing = [part for part in parts if part not in state_dict]
        if missing:
            raise ValueError(f"the original layout fuses {parts}, but {missing} is missing")
        fused[fused_name] = torch.cat([state_dict[part] for part in parts])
    return fused


def _swap_final_modulation(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Swap the halves of the last modulation's rows: (shift, scale) to (scale, shift), or back."""
    swapped = dict(state_dict)
    for name, tensor in state_dict.items():
        if name.startswith(prefix):
            first, second = _row_chunks(name, tensor, 2)
            swapped[name] = torch.cat((second, first))
    return swapped


def _row_chunks(name: str, tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    if tensor.ndim == 0 or tensor.shape[0] % count:
        raise ValueError(
            f"tensor {name!r} must have a multiple of {count} rows, got shape {tuple(tensor.shape)}"
        )
    return tensor.chunk(count)
