"""Conversion of tensor names between original HunyuanVideo-1.5 checkpoints and diffusers.

Most tensors differ only in name, according to ``names.yaml``. Two also differ in layout:

- the text refiner's fused ``self_attn_qkv`` is three matrices in diffusers, with rows in the order
  q, k, v;
- the last modulation, ``final_layer.adaLN_modulation.1``, returns (shift, scale), but diffusers'
  ``norm_out.linear`` returns (scale, shift): the two halves of the rows are swapped.

ComfyUI's model also fuses the queries, keys and values of the blocks. LoRA files for it have the
names of its layers.

All conversions are exact and round-trip bit for bit. An unknown name raises ValueError and is
never skipped.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from hyvideo.models.hunyuan_video15.settings import NAMES
from hyvideo.weights.names import LoraNames, both_directions

_to_diffusers, _to_original = both_directions(NAMES, "transformer", "transformer")
_from_comfyui, _to_comfyui = both_directions(NAMES, "comfyui", "ComfyUI transformer")
_LORA_MODULES = {
    name: diffusers
    for model in ("transformer", "comfyui", "lora")
    for name, diffusers in NAMES[model]["modules"].items()
}
_from_lora, _ = both_directions(
    NAMES | {"lora": NAMES["transformer"] | {"modules": _LORA_MODULES}}, "lora", "LoRA's"
)
vae_to_diffusers, vae_to_original = both_directions(NAMES, "vae", "VAE")


def transformer_to_diffusers(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of the original transformer to diffusers' names.

    Raises ValueError for unknown names.
    """
    return _swap_final_modulation(_split_qkv(_to_diffusers(state_dict)), "norm_out.linear.")


def transformer_to_original(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of diffusers' transformer to the original names and layout, the exact
    inverse.

    Raises ValueError for unknown names, such as those of a LoRA adapter, which must be merged
    first.
    """
    return _swap_final_modulation(
        _to_original(_fuse_qkv(state_dict, blocks=_REFINER)), "final_layer.adaLN_modulation.1."
    )


def transformer_to_comfyui(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of diffusers' transformer for ComfyUI: the original's names, with joined
    queries, keys and values of the blocks. ComfyUI renames the rest itself.
    """
    joined = {}
    for name, tensor in transformer_to_original(state_dict).items():
        match = _ORIGINAL_QKV.fullmatch(name)
        if match:
            joined.setdefault(f"{match[1]}qkv{match[3]}", {})[match[2]] = tensor
        else:
            joined[name] = tensor
    return {
        name: torch.cat([part[each] for each in "qkv"]) if isinstance(part, dict) else part
        for name, part in joined.items()
    }


def lora_to_diffusers(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows of layers by diffusers' names; they may have the original's names, ComfyUI's,
    or the original's with joined queries, keys and values.
    """
    return _swap_final_modulation(_split_qkv(_from_lora(rows)), "norm_out.linear.")


def lora_to_comfyui(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows of diffusers' layers by ComfyUI's names, the inverse. A fused layer has rows of
    zeros for a part that is missing, because a LoRA need not change all three.
    """
    return _swap_final_modulation(
        _to_comfyui(_fuse_qkv(rows, blocks=f"{_REFINER}|{_BLOCK}", fill=True)),
        "final_layer.adaLN_modulation.1.",
    )


_REFINER = r"context_embedder\.token_refiner\.refiner_blocks\.\d+"
_BLOCK = r"transformer_blocks\.\d+"
_ORIGINAL_QKV = re.compile(r"(double_blocks\.\d+\.(?:img|txt)_attn_)([qkv])(\.(?:weight|bias))")
_FUSED = re.compile(
    rf"((?:{_REFINER}|{_BLOCK})\.attn\.(?:to|add)_)qkv((?:_proj)?\.(?:weight|bias))"
)


def _split_qkv(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace each fused ``to_qkv`` (3 * dim, ...) with ``to_q``, ``to_k`` and ``to_v`` of shape
    (dim, ...), and ``add_qkv_proj`` likewise.
    """
    split = {}
    for name, tensor in state_dict.items():
        match = _FUSED.fullmatch(name)
        if match:
            for part, rows in zip("qkv", tensor.chunk(3)):
                # Cloned, so that the three parameters are not views of one tensor.
                split[f"{match[1]}{part}{match[2]}"] = rows.clone()
        else:
            split[name] = tensor
    return split


def _fuse_qkv(
    state_dict: Mapping[str, Tensor], *, blocks: str, fill: bool = False
) -> dict[str, Tensor]:
    """Replace ``to_q``, ``to_k`` and ``to_v`` of the blocks that match the regular expression with
    one ``to_qkv`` (3 * dim, ...), and ``add_q_proj`` likewise.

    A missing part is zero with ``fill``.
    """
    pattern = re.compile(rf"((?:{blocks})\.attn\.(?:to|add)_)[qkv]((?:_proj)?\.(?:weight|bias))")
    fused = {}
    for name, tensor in state_dict.items():
        match = pattern.fullmatch(name)
        if not match:
            fused[name] = tensor
            continue
        fused_name = f"{match[1]}qkv{match[2]}"
        if fused_name in fused:
            continue
        parts = [f"{match[1]}{part}{match[2]}" for part in "qkv"]
        if fill:
            zeros = dict.fromkeys(parts, torch.zeros_like(tensor))
            state_dict = zeros | dict(state_dict)
        fused[fused_name] = torch.cat([state_dict[part] for part in parts])
    return fused


def _swap_final_modulation(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Swap the halves of the last modulation's rows: (shift, scale) to (scale, shift), or back."""
    swapped = dict(state_dict)
    for name, tensor in state_dict.items():
        if name.startswith(prefix):
            first, second = tensor.chunk(2)
            swapped[name] = torch.cat((second, first))
    return swapped


LORA_NAMES = LoraNames(NAMES, lora_to_diffusers)
