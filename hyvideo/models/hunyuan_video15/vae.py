"""diffusers' VAE with two layers of its own: attention that takes batches, and a norm that is fast on a CPU too."""

import functools

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock, HunyuanVideo15RMS_norm
from torch import Tensor, nn

from hyvideo.models.norms import channels_normalised


def install_layers(vae: nn.Module) -> None:
    """Gives the layers of this VAE the mask and the norm below. Names and shapes of its weights stay.

    diffusers 0.42.1 makes a (batch, S, S) mask for (batch, 1, S, channels) queries, which fails beyond one sample, and
    fills it row by row in Python on every call. Its norm asks torch for a vector norm over channels, which on a CPU
    takes four to ten times as long as a sum of squares.
    """
    for module in vae.modules():
        if isinstance(module, HunyuanVideo15AttnBlock):
            # The mask is the same for every sample.
            module.prepare_causal_attention_mask = lambda *args, batch_size=None: causal_mask(*args)
        elif isinstance(module, HunyuanVideo15RMS_norm):
            module.forward = functools.partial(channels_normalised, module)


def set_tiling(vae: nn.Module, tile_size: int, overlap: float) -> None:
    """Have videos larger than a tile of ``tile_size`` pixels decoded in tiles; smaller ones are not touched."""
    latent = tile_size // vae.config.spatial_compression_ratio
    vae.enable_tiling(tile_size, tile_size, latent, latent)
    vae.tile_overlap_factor = overlap  # enable_tiling would take 0 for "as it was"


# A tiled decode has at most four shapes of tile: inner, right edge, bottom edge, corner. A mask is S^2 large,
# so no more are kept.
@functools.lru_cache(maxsize=4)
def causal_mask(num_frames: int, frame_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where a token may look, its own frame and earlier ones, -inf elsewhere. Shape: (tokens, tokens)."""
    # Never an inference tensor: the cached mask may be wanted for a backward pass later.
    with torch.inference_mode(False):
        frame = torch.arange(num_frames, device=device).repeat_interleave(frame_tokens)
        mask = torch.zeros(len(frame), len(frame), dtype=dtype, device=device)
        return mask.masked_fill_(frame[None, :] > frame[:, None], float("-inf"))
