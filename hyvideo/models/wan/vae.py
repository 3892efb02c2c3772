"""Placeholder."""

from hyvideo.models.family import Component, Latents

VAE = Component("AutoencoderKLWan", dict, dict, dict, dict)


def prepare(vae):
    pass


def set_tiling(vae, tile_size, overlap):
    pass


def latents(config):
    return Latents(config["z_dim"], 4, 8, tuple(config["latents_mean"]), tuple(1 / s for s in config["latents_std"]))


def export_parts(*args, **how):
    return iter(())
