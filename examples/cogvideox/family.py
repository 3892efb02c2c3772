"""`Family` of CogVideoX."""

from hyvideo.models.family import Component, Family

from . import encoders, transformer, vae

FAMILY = Family(
    name="cogvideox",
    # Only diffusers' layout is supported.
    transformer=Component(
        "CogVideoXTransformer3DModel",
        dict,
        dict,
        vae.only_diffusers,
        vae.only_diffusers,
        finish=transformer.finish,
    ),
    vae=Component("AutoencoderKLCogVideoX", dict, dict, vae.only_diffusers, vae.only_diffusers),
    blocks="transformer_blocks",
    # Excludes modulation, embedders and output layer.
    matrices=r"transformer_blocks\.\d+\.(attn1|ff)\..*",
    original_modules=r"(?!)",
    forwards=transformer.forwards,
    parts=encoders.PARTS,
    latents=vae.latents,
    patch=lambda config: (1, config["patch_size"], config["patch_size"]),
    prepare_vae=lambda vae: None,
    set_tiling=vae.set_tiling,
    decoder_returns_cache=True,
    pipelines={"t2v": "CogVideoXPipeline"},
)
