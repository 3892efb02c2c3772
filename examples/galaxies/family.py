"""`Family` of the score networks of galaxygrad."""

from hyvideo.models.family import Component, Family

from . import pixels, transformer
from .network import GalaxyScoreNet

FAMILY = Family(
    name="galaxies",
    transformer=Component(
        "GalaxyScoreNet",
        dict,
        dict,
        pixels.only_diffusers,
        pixels.only_diffusers,
        build=GalaxyScoreNet,
    ),
    vae=Component(
        "GalaxyPixels",
        dict,
        dict,
        pixels.only_diffusers,
        pixels.only_diffusers,
        build=pixels.GalaxyPixels,
    ),
    blocks="blocks",
    target_modules=r"blocks\.\d+\.(patch|channel)_mixer\.(up|down)",
    forwards=transformer.forwards,
    parts=(),  # no prompt, no image
    latents=pixels.latents,
    patch=lambda config: (1, config["patch_size"], config["patch_size"]),
    prepare_vae=lambda vae: None,
    set_tiling=pixels.set_tiling,
    pipelines={},
)
