"""`Family` of HunyuanVideo-1.5."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyvideo.models.family import Component, Family, Latents, License, Part
from hyvideo.models.hunyuan_video15 import (
    encoders,
    modulation,
    names,
    settings,
    transformer,
    vae,
)
from hyvideo.models.hunyuan_video15.prompt_encoders import (
    GlyphEncoder,
    ImageEncoder,
    TextEncoder,
    glyph_text,
)
from hyvideo.models.placement import Placement

Encoder = Callable[..., list[dict[str, Tensor]]]


def _load_text(
    root: Path, *, transformer: Mapping[str, Any], vae: nn.Module, **kwargs: Any
) -> Encoder:
    encode = TextEncoder(*encoders.load_text_encoder(root, **kwargs))
    return lambda prompts, size: [{"states": states} for states in encode(prompts)]


def _load_glyph(
    root: Path,
    *,
    transformer: Mapping[str, Any],
    vae: nn.Module,
    dtype: torch.dtype,
    placement: Placement = Placement.GPU,
    rotary_dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> Encoder:
    # float32, as in the original
    encode = GlyphEncoder(*encoders.load_glyph_encoder(root, **kwargs))
    return lambda texts, size: [{"states": encode(text)} for text in texts]


def _load_image(
    root: Path,
    *,
    transformer: Mapping[str, Any],
    vae: nn.Module,
    placement: Placement = Placement.GPU,
    **kwargs: Any,
) -> Encoder:
    encode = ImageEncoder(*encoders.load_vision_encoder(root, **kwargs), vae)
    return lambda paths, size: [vars(encode(path, *size[1:])) for path in paths]


def _latents(config: Mapping[str, Any]) -> Latents:
    sizes = (
        config[key]
        for key in ("latent_channels", "temporal_compression_ratio", "spatial_compression_ratio")
    )
    return Latents(*sizes, mean=(0.0,), scale=(config["scaling_factor"],))


FAMILY = Family(
    name="hunyuan_video15",
    transformer=Component(
        "HunyuanVideo15Transformer3DModel",
        names.transformer_to_diffusers,
        names.transformer_to_original,
        settings.transformer_config_to_diffusers,
        settings.transformer_config_to_original,
    ),
    vae=Component(
        "AutoencoderKLHunyuanVideo15",
        names.vae_to_diffusers,
        names.vae_to_original,
        settings.vae_config_to_diffusers,
        settings.vae_config_to_original,
    ),
    blocks="transformer_blocks",
    license=License(
        "other",
        "tencent-hunyuan-community",
        "https://huggingface.co/tencent/HunyuanVideo-1.5/blob/main/LICENSE",
        must_be_copied=True,
    ),
    lora_to_comfyui=names.lora_to_comfyui,
    model_to_comfyui=names.transformer_to_comfyui,
    lora_names=names.LORA_NAMES,
    # Excludes modulation, embedders and output layer, which have few inputs per update and thus
    # gradients of low rank.
    target_modules=r"transformer_blocks\.\d+\.(attn|ff|ff_context)\..*",
    forwards=transformer.forwards,
    is_flow_map=lambda config: config["use_meanflow"],
    parts=(
        Part(
            "text",
            content=lambda request: request.prompt,
            folders=("text_encoder", "text_encoder/llm", "tokenizer"),
            load=_load_text,
            problems=encoders.text_encoder_problems,
        ),
        Part(
            "glyph",
            content=lambda request: (
                (not request.is_negative and glyph_text(request.prompt)) or None
            ),
            folders=(
                "text_encoder/byt5-small",
                "text_encoder/Glyph-SDXL-v2/checkpoints",
                "text_encoder_2",
                "tokenizer_2",
            ),
            load=_load_glyph,
            problems=encoders.glyph_encoder_problems,
            feeds="context_embedder_2",
        ),
        Part(
            "image",
            content=lambda request: request.image,
            is_file=True,
            folders=(
                "vision_encoder/siglip/image_encoder",
                "vision_encoder/siglip/feature_extractor",
                "image_encoder",
                "feature_extractor",
            ),
            load=_load_image,
            problems=encoders.vision_encoder_problems,
            feeds="image_embedder",
        ),
    ),
    latents=_latents,
    patch=lambda config: (config["patch_size_t"], config["patch_size"], config["patch_size"]),
    prepare_vae=vae.install_layers,
    set_tiling=vae.set_tiling,
    pipelines={"t2v": "HunyuanVideo15Pipeline", "i2v": "HunyuanVideo15ImageToVideoPipeline"},
    without_gradient=transformer.unused_modules,
    cache_modulation=modulation.cache_modulation,
    rounds_rotary=True,
)
