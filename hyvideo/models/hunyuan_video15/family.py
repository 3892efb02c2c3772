"""`Family` of HunyuanVideo-1.5."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyvideo.models.family import Component, Family, Latents, Part
from hyvideo.models.hunyuan_video15 import encoders, names, settings, transformer, upsamplers, vae
from hyvideo.models.hunyuan_video15.prompt_encoders import GlyphEncoder, ImageEncoder, TextEncoder, glyph_text
from hyvideo.models.versions import version_defaults

Encoder = Callable[..., list[dict[str, Tensor]]]


def _load_text(root: Path, *, vae: nn.Module, **kwargs: Any) -> Encoder:
    encode = TextEncoder(*encoders.load_text_encoder(root, **kwargs))
    return lambda prompts, *size: [{"states": states} for states in encode(prompts)]


def _load_glyph(
    root: Path, *, vae: nn.Module, dtype: torch.dtype, group_offload: bool = False, **kwargs: Any
) -> Encoder:
    encode = GlyphEncoder(*encoders.load_glyph_encoder(root, **kwargs))  # float32, as in the original
    return lambda texts, *size: [{"states": encode(text)} for text in texts]


def _load_image(root: Path, *, vae: nn.Module, group_offload: bool = False, **kwargs: Any) -> Encoder:
    encode = ImageEncoder(*encoders.load_vision_encoder(root, **kwargs), vae)
    return lambda paths, height, width: [vars(encode(path, height, width)) for path in paths]


def _latents(config: Mapping[str, Any]) -> Latents:
    sizes = (config[key] for key in ("latent_channels", "temporal_compression_ratio", "spatial_compression_ratio"))
    return Latents(*sizes, mean=(0.0,), scale=(config["scaling_factor"],))


def _export_parts(
    root: Path, out: Path, *, version: str | None, task: str, dtype: torch.dtype, load_vae: Callable[..., nn.Module]
) -> Iterator[tuple[str, Any]]:
    """Yield the names and parts of diffusers' pipeline except the transformer, keeping one part in memory at a time."""
    import diffusers

    defaults = version_defaults(version)
    yield "scheduler", diffusers.FlowMatchEulerDiscreteScheduler(shift=defaults.shift)
    yield "guider", diffusers.ClassifierFreeGuidance(guidance_scale=defaults.guidance_scale)
    # The decoding error in bf16 is eight times that in fp16, which this project's runs and the original use.
    yield "vae", load_vae(root, dtype=torch.float16 if dtype == torch.bfloat16 else dtype)
    yield from zip(("tokenizer", "text_encoder"), encoders.load_text_encoder(root, dtype=dtype))
    yield from zip(("tokenizer_2", "text_encoder_2"), encoders.load_glyph_encoder(root))
    if task == "i2v":
        yield "image_encoder", encoders.load_vision_encoder(root, dtype=dtype)[1]
        # Copied, not loaded, because transformers' processor of this name needs torchvision.
        source, target = encoders.vision_folders(root)[1], out / "feature_extractor"
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / source.name)
        yield "feature_extractor", ("transformers", "SiglipImageProcessor")


FAMILY = Family(
    name="hunyuan_video15",
    transformer=Component(
        "HunyuanVideo15Transformer3DModel",
        names.transformer_to_diffusers,
        names.transformer_to_original,
        settings.transformer_config_to_diffusers,
        settings.transformer_config_to_original,
        ignored=frozenset({"target_size", "task_type"}),
    ),
    vae=Component(
        "AutoencoderKLHunyuanVideo15",
        names.vae_to_diffusers,
        names.vae_to_original,
        settings.vae_config_to_diffusers,
        settings.vae_config_to_original,
    ),
    blocks="transformer_blocks",
    # Excludes modulation, embedders and output layer, which have few inputs per update and thus gradients of low rank.
    matrices=r"transformer_blocks\.\d+\.(attn|ff|ff_context)\..*",
    original_modules=r"double_blocks\.|txt_in\.|img_in\.|byt5_in\.|vision_in\.|time_in\.|final_layer\.",
    forwards=transformer.forwards,
    reads_ends=lambda config: config["use_meanflow"],
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
            content=lambda request: (not request.is_negative and glyph_text(request.prompt)) or None,
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
    export_parts=_export_parts,
    without_gradient=transformer.unused_modules,
    upsampler=upsamplers.COMPONENT,
)
