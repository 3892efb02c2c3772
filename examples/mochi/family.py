"""`Family` of Mochi."""

from hyvideo.models.family import Component, Family

from . import encoders, transformer, vae

FAMILY = Family(
    name="mochi",
    # Only diffusers' layout is supported.
    transformer=Component(
        "MochiTransformer3DModel", dict, dict, vae.only_diffusers, vae.only_diffusers
    ),
    vae=Component("AutoencoderKLMochi", dict, dict, vae.only_diffusers, vae.only_diffusers),
    blocks="transformer_blocks",
    # Excludes modulation, embedders and output layer, which have few inputs per update and thus
    # gradients of low rank.
    target_modules=r"transformer_blocks\.\d+\.(attn1|ff|ff_context)\..*",
    forwards=transformer.forwards,
    parts=encoders.PARTS,
    latents=vae.latents,
    patch=lambda config: (1, config["patch_size"], config["patch_size"]),
    prepare_vae=lambda vae: None,
    set_tiling=vae.set_tiling,
    decoder_returns_cache=True,
    pipelines={"t2v": "MochiPipeline"},
)
