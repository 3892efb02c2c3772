"""diffusers' VAE with two replaced layers: attention that supports batches, and a norm that is also fast on a CPU."""

import functools

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock, HunyuanVideo15RMS_norm
from torch import Tensor, nn

from hyvideo.models.norms import channel_rms_norm


def install_layers(vae: nn.Module) -> None:
    """Replace the attention masks and norms of the VAE, keeping the names and shapes of its weights.

    diffusers 0.42.1 builds a (batch, S, S) mask for (batch, 1, S, channels) queries, which fails for more than one
    sample, and fills it row by row in Python in every call. Its norm uses torch's vector norm over channels, which on a
    CPU takes four to ten times as long as a sum of squares.
    """
    for module in vae.modules():
        if isinstance(module, HunyuanVideo15AttnBlock):
            # The mask is the same for every sample.
            module.prepare_causal_attention_mask = lambda *args, batch_size=None: causal_mask(*args)
        elif isinstance(module, HunyuanVideo15RMS_norm):
            module.forward = functools.partial(channel_rms_norm, module)


def set_tiling(vae: nn.Module, tile_size: int, overlap: float) -> None:
    """Decode videos larger than ``tile_size`` pixels in tiles of that size; smaller videos are decoded whole."""
    latent = tile_size // vae.config.spatial_compression_ratio
    vae.enable_tiling(tile_size, tile_size, latent, latent)
    vae.tile_overlap_factor = overlap  # enable_tiling would ignore 0


# Tiles have at most four shapes: inner, right edge, bottom edge and corner. A mask has S^2 values.
@functools.lru_cache(maxsize=4)
def causal_mask(num_frames: int, frame_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a mask that is 0 for tokens of the same or earlier frames and -inf for others. Shape: (tokens, tokens)."""
    # Not an inference tensor, because a later backward pass may need the cached mask.
    with torch.inference_mode(False):
        frame = torch.arange(num_frames, device=device).repeat_interleave(frame_tokens)
        mask = torch.zeros(len(frame), len(frame), dtype=dtype, device=device)
        return mask.masked_fill_(frame[None, :] > frame[:, None], float("-inf"))
