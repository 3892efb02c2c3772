"""`Family` of Wan."""

from hyvideo.models.family import Component, Family, License
from hyvideo.models.wan import encoders, original_files, settings, transformer, vae

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
    variants=(
        Component(
            settings.ANYFLOW,
            settings.transformer_to_diffusers,
            settings.transformer_to_original,
            settings.anyflow_only_diffusers,
            settings.anyflow_only_diffusers,
            finish=transformer.finish_anyflow,
        ),
    ),
    # Only diffusers' layout is supported.
    vae=Component("AutoencoderKLWan", dict, dict, vae.only_diffusers, vae.only_diffusers),
    blocks="blocks",
    # Excludes modulation, embedders and output layer, which have few inputs per update and thus
    # gradients of low rank.
    target_modules=r"blocks\.\d+\.(attn1|attn2|ffn)\..*",
    license=License("apache-2.0", "Apache-2.0"),
    lora_prefix="diffusion_model.",
    lora_names=settings.LORA_NAMES,
    lora_to_comfyui=settings.transformer_to_original,
    model_to_comfyui=settings.transformer_to_original,
    unread_files=original_files.unread_files,
    forwards=transformer.forwards,
    is_flow_map=settings.is_flow_map,
    parts=encoders.PARTS,
    latents=vae.latents,
    patch=lambda config: tuple(config["patch_size"]),
    prepare_vae=vae.prepare,
    set_tiling=vae.set_tiling,
    pipelines={"t2v": "WanPipeline", "i2v": "WanImageToVideoPipeline"},
    task=settings.task,
    given_frames=settings.given_frames,
)
