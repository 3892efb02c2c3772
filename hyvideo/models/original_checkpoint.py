"""The names of the original HunyuanVideo-1.5 checkpoints, mapped to diffusers' and back.

The two implementations hold the same numbers. Nearly every tensor only changes its name, and the tables below
say how; two places also change their arrangement:

- the text refiner's fused ``self_attn_qkv`` is three matrices in diffusers, its rows in the order q, k, v;
- the last modulation ``final_layer.adaLN_modulation.1`` gives (shift, scale), diffusers' ``norm_out.linear``
  gives (scale, shift): the two halves of the rows change places.

Both are exact, so a round trip gives back every bit. A name that no row knows is a ValueError, never skipped. The
settings in config.json are mapped by ``original_config``.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hyvideo.models.original_config import transformer_config_to_diffusers

__all__ = [
    "transformer_config_to_diffusers",
    "transformer_to_diffusers",
    "transformer_to_original",
    "vae_to_diffusers",
    "vae_to_original",
]

# What the placeholders in the tables stand for.
_PLACEHOLDERS = {
    "i": r"\d+",
    "j": r"\d+",
    "x": "[qkv]",
    "n": "[123]",
    "half": "encoder|decoder",
    "layer": "norm1|norm2|conv1|conv2",
    "end": "norm|proj_out",
}


class _Renaming(NamedTuple):
    """A row of a table in one direction: a name that matches becomes the template, filled in."""

    pattern: re.Pattern[str]
    template: str


class _NameTable:
    """Pairs of (original module, diffusers module), readable in both directions.

    Args:
        rows: The pairs; a placeholder in braces stands on both sides of its row.
        leaves: Regular expression of what may follow the module's name.
    """

    def __init__(self, rows: list[tuple[str, str]], leaves: str):
        self._leaves = leaves
        self.to_diffusers = [self._renaming(original, diffusers) for original, diffusers in rows]
        self.to_original = [self._renaming(diffusers, original) for original, diffusers in rows]

    def _renaming(self, source: str, target: str) -> _Renaming:
        pattern = re.escape(source)
        for name, expression in _PLACEHOLDERS.items():
            pattern = pattern.replace(re.escape(f"{{{name}}}"), f"(?P<{name}>{expression})")
        return _Renaming(re.compile(rf"{pattern}\.(?P<leaf>{self._leaves})"), target + ".{leaf}")


_REFINER = "txt_in.individual_token_refiner.blocks.{i}"
_REFINER_BLOCK = "context_embedder.token_refiner.refiner_blocks.{i}"
_TEXT_TIME = "context_embedder.time_text_embed.timestep_embedder"

_TRANSFORMER = _NameTable(
    [
        ("time_in.mlp.0", "time_embed.timestep_embedder.linear_1"),
        ("time_in.mlp.2", "time_embed.timestep_embedder.linear_2"),
        ("time_r_in.mlp.0", "time_embed.timestep_embedder_r.linear_1"),
        ("time_r_in.mlp.2", "time_embed.timestep_embedder_r.linear_2"),
        ("txt_in.t_embedder.mlp.0", f"{_TEXT_TIME}.linear_1"),
        ("txt_in.t_embedder.mlp.2", f"{_TEXT_TIME}.linear_2"),
        ("txt_in.c_embedder.linear_{n}", "context_embedder.time_text_embed.text_embedder.linear_{n}"),
        ("txt_in.input_embedder", "context_embedder.proj_in"),
        (f"{_REFINER}.norm{{n}}", f"{_REFINER_BLOCK}.norm{{n}}"),
        # to_qkv exists only between the renaming and the split into to_q, to_k, to_v.
        (f"{_REFINER}.self_attn_qkv", f"{_REFINER_BLOCK}.attn.to_qkv"),
        (f"{_REFINER}.self_attn_proj", f"{_REFINER_BLOCK}.attn.to_out.0"),
        (f"{_REFINER}.mlp.fc1", f"{_REFINER_BLOCK}.ff.net.0.proj"),
        (f"{_REFINER}.mlp.fc2", f"{_REFINER_BLOCK}.ff.net.2"),
        (f"{_REFINER}.adaLN_modulation.1", f"{_REFINER_BLOCK}.norm_out.linear"),
        ("byt5_in.layernorm", "context_embedder_2.norm"),
        ("byt5_in.fc{n}", "context_embedder_2.linear_{n}"),
        ("vision_in.proj.0", "image_embedder.norm_in"),
        ("vision_in.proj.1", "image_embedder.linear_1"),
        ("vision_in.proj.3", "image_embedder.linear_2"),
        ("vision_in.proj.4", "image_embedder.norm_out"),
        ("img_in.proj", "x_embedder.proj"),
        ("cond_type_embedding", "cond_type_embed"),
        ("double_blocks.{i}.img_mod.linear", "transformer_blocks.{i}.norm1.linear"),
        ("double_blocks.{i}.txt_mod.linear", "transformer_blocks.{i}.norm1_context.linear"),
        ("double_blocks.{i}.img_attn_{x}", "transformer_blocks.{i}.attn.to_{x}"),
        ("double_blocks.{i}.txt_attn_{x}", "transformer_blocks.{i}.attn.add_{x}_proj"),
        ("double_blocks.{i}.img_attn_{x}_norm", "transformer_blocks.{i}.attn.norm_{x}"),
        ("double_blocks.{i}.txt_attn_{x}_norm", "transformer_blocks.{i}.attn.norm_added_{x}"),
        ("double_blocks.{i}.img_attn_proj", "transformer_blocks.{i}.attn.to_out.0"),
        ("double_blocks.{i}.txt_attn_proj", "transformer_blocks.{i}.attn.to_add_out"),
        ("double_blocks.{i}.img_mlp.fc1", "transformer_blocks.{i}.ff.net.0.proj"),
        ("double_blocks.{i}.img_mlp.fc2", "transformer_blocks.{i}.ff.net.2"),
        ("double_blocks.{i}.txt_mlp.fc1", "transformer_blocks.{i}.ff_context.net.0.proj"),
        ("double_blocks.{i}.txt_mlp.fc2", "transformer_blocks.{i}.ff_context.net.2"),
        ("final_layer.adaLN_modulation.1", "norm_out.linear"),
        ("final_layer.linear", "proj_out"),
    ],
    leaves="weight|bias",
)

_VAE = _NameTable(
    [
        ("{half}.conv_in", "{half}.conv_in"),
        ("{half}.conv_out", "{half}.conv_out"),
        ("{half}.norm_out", "{half}.norm_out"),
        ("encoder.down.{i}.block.{j}.{layer}", "encoder.down_blocks.{i}.resnets.{j}.{layer}"),
        ("encoder.down.{i}.block.{j}.nin_shortcut", "encoder.down_blocks.{i}.resnets.{j}.conv_shortcut"),
        ("encoder.down.{i}.downsample.conv", "encoder.down_blocks.{i}.downsamplers.0.conv"),
        ("decoder.up.{i}.block.{j}.{layer}", "decoder.up_blocks.{i}.resnets.{j}.{layer}"),
        ("decoder.up.{i}.block.{j}.nin_shortcut", "decoder.up_blocks.{i}.resnets.{j}.conv_shortcut"),
        ("decoder.up.{i}.upsample.conv", "decoder.up_blocks.{i}.upsamplers.0.conv"),
        ("{half}.mid.block_1.{layer}", "{half}.mid_block.resnets.0.{layer}"),
        ("{half}.mid.block_2.{layer}", "{half}.mid_block.resnets.1.{layer}"),
        ("{half}.mid.attn_1.{x}", "{half}.mid_block.attentions.0.to_{x}"),
        ("{half}.mid.attn_1.{end}", "{half}.mid_block.attentions.0.{end}"),
    ],
    leaves=r"weight|bias|conv\.weight|conv\.bias|gamma",
)


def transformer_to_diffusers(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the original transformer under diffusers' names.

    Raises:
        ValueError: A tensor's name is none of the original's, or its rows cannot be split.
    """
    renamed = _rename(state_dict, _TRANSFORMER.to_diffusers, "an original transformer")
    return _swap_final_modulation(_split_refiner_qkv(renamed), "norm_out.linear.")


def transformer_to_original(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of diffusers' transformer under the original names, bit for bit what it was read from.

    Raises:
        ValueError: A tensor's name is none of diffusers' (a LoRA adapter's, for instance: merge it first), or
            a refiner block has only some of to_q, to_k and to_v.
    """
    renamed = _rename(_fuse_refiner_qkv(state_dict), _TRANSFORMER.to_original, "a diffusers transformer")
    return _swap_final_modulation(renamed, "final_layer.adaLN_modulation.1.")


def vae_to_diffusers(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the original VAE under diffusers' names; ValueError for an unknown name."""
    return _rename(state_dict, _VAE.to_diffusers, "an original VAE")


def vae_to_original(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of diffusers' VAE under the original names; ValueError for an unknown name."""
    return _rename(state_dict, _VAE.to_original, "a diffusers VAE")


def _rename(state_dict: Mapping[str, Tensor], renamings: list[_Renaming], kind: str) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in state_dict.items():
        new_name = _new_name(name, renamings)
        if new_name is None:
            raise ValueError(f"tensor {name!r} with shape {tuple(tensor.shape)} is no tensor of {kind} checkpoint")
        renamed[new_name] = tensor
    return renamed


def _new_name(name: str, renamings: list[_Renaming]) -> str | None:
    for pattern, template in renamings:
        if match := pattern.fullmatch(name):
            return template.format(**match.groupdict())
    return None


_FUSED = re.compile(r"(context_embedder\.token_refiner\.refiner_blocks\.\d+\.attn)\.to_qkv\.(weight|bias)")
_SPLIT = re.compile(r"(context_embedder\.token_refiner\.refiner_blocks\.\d+\.attn)\.to_[qkv]\.(weight|bias)")


def _split_refiner_qkv(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replaces every fused ``to_qkv`` (3 * dim, ...) by ``to_q``, ``to_k``, ``to_v`` of shape (dim, ...)."""
    split = {}
    for name, tensor in state_dict.items():
        if match := _FUSED.fullmatch(name):
            for part, rows in zip("qkv", _row_chunks(name, tensor, 3)):
                # A copy, so that the three are parameters of their own and not views of one.
                split[f"{match[1]}.to_{part}.{match[2]}"] = rows.clone()
        else:
            split[name] = tensor
    return split


def _fuse_refiner_qkv(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replaces ``to_q``, ``to_k``, ``to_v`` of every refiner block by one ``to_qkv`` (3 * dim, ...)."""
    fused = {}
    for name, tensor in state_dict.items():
        if _FUSED.fullmatch(name):
            raise ValueError(f"tensor {name!r} is fused already; call unfuse_qkv_projections() on the model first")
        match = _SPLIT.fullmatch(name)
        if not match:
            fused[name] = tensor
        elif (fused_name := f"{match[1]}.to_qkv.{match[2]}") not in fused:
            parts = [f"{match[1]}.to_{part}.{match[2]}" for part in "qkv"]
            if missing := [part for part in parts if part not in state_dict]:
                raise ValueError(f"the original layout fuses {parts}, but {missing} is missing")
            fused[fused_name] = torch.cat([state_dict[part] for part in parts])
    return fused


def _swap_final_modulation(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Exchanges the halves of the last modulation's rows: (shift, scale) to (scale, shift), or back."""
    return {
        name: torch.cat(_row_chunks(name, tensor, 2)[::-1]) if name.startswith(prefix) else tensor
        for name, tensor in state_dict.items()
    }


def _row_chunks(name: str, tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    if tensor.ndim == 0 or tensor.shape[0] % count:
        raise ValueError(
            f"tensor {name!r} has shape {tuple(tensor.shape)}; its rows must be a multiple of {count}, "
            "so this is no HunyuanVideo-1.5 checkpoint"
        )
    return tensor.chunk(count)
