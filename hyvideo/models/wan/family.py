"""Wan as the rest of the program sees it."""

from hyvideo.models.family import Component, Family
from hyvideo.models.wan import encoders, settings, transformer, vae

FAMILY = Family(
    name="wan",
    transformer=Component(
        "WanTransformer3DModel",
        settings.transformer_to_diffusers,
        settings.transformer_to_original,
        settings.transformer_config_to_diffusers,
        settings.transformer_config_to_original,
        finish=transformer.finish,
    ),
    # Read and written in diffusers' layout only.
    vae=Component("AutoencoderKLWan", dict, dict, vae.only_diffusers, vae.only_diffusers),
    blocks="blocks",
    # Modulation, embedders and the output layer see few samples at a time: their gradients have a rank as low.
    matrices=r"blocks\.\d+\.(attn1|attn2|ffn)\..*",
    original_modules=r"blocks\.\d+\.((self|cross)_attn\.|ffn\.\d)|text_embedding\.|time_embedding\.|time_projection\.|head\.",
    lora_prefix="diffusion_model.",
    forwards=transformer.forwards,
    stock_inputs=transformer.stock_inputs,
    parts=encoders.PARTS,
    latents=vae.latents,
    patch=lambda config: tuple(config["patch_size"]),
    prepare_vae=vae.prepare,
    set_tiling=vae.set_tiling,
    pipelines={"t2v": "WanPipeline"},
    export_parts=vae.export_parts,
)
