"""diffusers' VAE with replaced layers: attention that supports batches, faster norms, and
convolutions on CUDA.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from hyvideo.models.norms import channel_rms_norm


def install_layers(vae: nn.Module) -> None:
    """Replace the attention masks, norms and, on a GPU, forward passes of the VAE, keeping the names and shapes of its
    weights.

    diffusers 0.42.1 builds a (batch, S, S) mask for (batch, 1, S, channels) queries, which fails
    for more than one sample, and fills it row by row in Python in every call. Its norm uses torch's
    vector norm over channels, which on a CPU takes four to ten times as long as a sum of squares.
    """
    # Not at the top: diffusers would import all its models, also to read a LoRA.
    from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as layers

    on_cuda = {
        layers.HunyuanVideo15Decoder3D: decoder_forward,
        layers.HunyuanVideo15ResnetBlock: resnet_forward,
        layers.HunyuanVideo15CausalConv3d: causal_conv_forward,
    }
    for module in vae.modules():
        if isinstance(module, layers.HunyuanVideo15AttnBlock):
            # The mask is the same for every sample.
            module.prepare_causal_attention_mask = lambda *args, batch_size=None: causal_mask(*args)
        elif isinstance(module, layers.HunyuanVideo15RMS_norm):
            module.forward = functools.partial(channel_rms_norm, module)
        for kind, forward in on_cuda.items():
            if isinstance(module, kind):
                module.forward = functools.partial(_forward, module, forward)


def _forward(
    module: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor], hidden: Tensor
) -> Tensor:
    """Run ``forward``, which needs less memory, on a GPU, and diffusers' own forward pass on a CPU.

    With gradients, a residual block keeps only its input, and its backward pass computes the rest
    again.
    """
    if not hidden.is_cuda:
        return type(module).forward(module, hidden)
    if hidden.requires_grad and forward is resnet_forward:
        return checkpoint(forward, module, hidden, use_reentrant=False)
    return forward(module, hidden)


def decoder_forward(decoder: nn.Module, hidden: Tensor) -> Tensor:
    """Return the decoder's output; unlike diffusers', the pass keeps only the current layer's
    input.
    """
    hidden = decoder.conv_in(hidden) + hidden.repeat_interleave(repeats=decoder.repeat, dim=1)
    hidden = decoder.mid_block(hidden)
    for block in decoder.up_blocks:
        for layer in (*block.resnets, *(block.upsamplers or ())):
            hidden = layer(hidden)
    hidden = decoder.norm_out(hidden)
    hidden = replication_pad(hidden, decoder.conv_out.time_causal_padding, silu=True)
    return decoder.conv_out.conv(hidden)


def resnet_forward(block: nn.Module, hidden: Tensor) -> Tensor:
    """Return the output of a residual block, with at most three feature maps in memory, its input
    included.
    """
    residual = hidden
    for norm, layer in ((block.norm1, block.conv1), (block.norm2, block.conv2)):
        hidden = norm(hidden)
        hidden = replication_pad(hidden, layer.time_causal_padding, silu=True)
        hidden = layer.conv(hidden)
    if block.conv_shortcut is not None:
        residual = block.conv_shortcut(residual)
    return hidden.add_(residual)


def causal_conv_forward(layer: nn.Module, hidden: Tensor) -> Tensor:
    """Return the output of a causal convolution.

    Shape: (batch, channels, frames, height, width).
    """
    return layer.conv(replication_pad(hidden, layer.time_causal_padding))


def replication_pad(hidden: Tensor, padding: Sequence[int], *, silu: bool = False) -> Tensor:
    """Return ``hidden``, perhaps after SiLU, with replicated borders, in channels-last layout,
    which F.pad loses.

    The gradient has this layout too and is deterministic, unlike that of F.pad.
    """
    return _ReplicationPad.apply(hidden, padding, silu)


class _ReplicationPad(torch.autograd.Function):
    """`replication_pad`, whose backward pass adds the gradients of the borders to those of the
    values that they replicate.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, padding: Sequence[int], silu: bool) -> Tensor:
        sides = list(zip((-1, -2, -3), padding[::2], padding[1::2]))  # width, height, frames
        ctx.sides = sides
        if silu:
            ctx.save_for_backward(hidden)
        added = [0, 0, *(before + after for _, before, after in reversed(sides))]
        shape = [size + more for size, more in zip(hidden.shape, added)]
        padded = inner = torch.empty(
            shape,
            dtype=hidden.dtype,
            device=hidden.device,
            memory_format=torch.channels_last_3d,
        )
        for dim, before, _ in sides:
            inner = inner.narrow(dim, before, hidden.shape[dim])
        if silu:
            torch.ops.aten.silu.out(hidden, out=inner)
        else:
            inner.copy_(hidden)
        for dim, before, after in sides:  # in this order, the last copies include the corners
            end = shape[dim] - after
            padded.narrow(dim, 0, before).copy_(padded.narrow(dim, before, 1))
            padded.narrow(dim, end, after).copy_(padded.narrow(dim, end - 1, 1))
        return padded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = _with_borders_added(gradient, ctx.sides[::-1])
        saved = ctx.saved_tensors  # read once: within a checkpoint, a second time is an error
        if saved:
            gradient = torch.ops.aten.silu_backward(gradient, *saved)
        return gradient, None, None


def _with_borders_added(padded: Tensor, sides: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return a copy of ``padded`` without its borders, which are added to the outermost values.

    ``sides``: dimension, and the number of values before and after.
    """
    if not sides:
        return padded.clone(memory_format=torch.channels_last_3d)
    (dim, before, after), *others = sides
    size = padded.shape[dim] - before - after
    inner = _with_borders_added(padded.narrow(dim, before, size), others)
    # One plane for each border: a border is at most a few values wide.
    for start, width, goal in ((0, before, 0), (before + size, after, size - 1)):
        if width:
            border = padded.narrow(dim, start, width).sum(dim, keepdim=True)
            inner.narrow(dim, goal, 1).add_(_with_borders_added(border, others))
    return inner


def set_tiling(vae: nn.Module, tile_size: int, overlap: float) -> None:
    """Decode videos larger than ``tile_size`` pixels in tiles of that size; smaller videos are
    decoded whole.

    The overlap is rounded up to whole latents, because diffusers shifts the decoded tiles
    otherwise.
    """
    side = vae.config.spatial_compression_ratio
    latent = tile_size // side
    vae.enable_tiling(tile_size, tile_size, latent, latent)
    vae.tile_overlap_factor = math.ceil(latent * overlap) / latent  # enable_tiling would ignore 0


# Tiles have at most four shapes: inner, right edge, bottom edge and corner. A mask has S^2 values.
@functools.lru_cache(maxsize=4)
def causal_mask(
    num_frames: int, frame_tokens: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a mask that is 0 for tokens of the same or earlier frames and -inf for others.

    Shape: (tokens, tokens).
    """
    # Not an inference tensor, because a later backward pass may need the cached mask.
    with torch.inference_mode(False):
        frame = torch.arange(num_frames, device=device).repeat_interleave(frame_tokens)
        mask = torch.zeros(len(frame), len(frame), dtype=dtype, device=device)
        return mask.masked_fill_(frame[None, :] > frame[:, None], float("-inf"))
