"""Bytes that stay between the passes: parameters, gradients, optimizer state, anchor, and the frozen models around."""

from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.run_shape import BYTES, RunShape

# Parameters of the released encoders and VAE; ByT5 stays in float32.
_LANGUAGE_MODEL, _GLYPH_ENCODER, _VISION_ENCODER = 7.07e9, 0.22e9, 0.428e9
_VAE = 1_260_634_115
# Feature maps of the decoder's first width, at full resolution, that decoding holds at most. Simulated with fake
# tensors: 7.06 for a tile of 256 pixels and 81 frames, 7.08 for 121; kernels' workspaces come on top.
_DECODER_MAPS = 7.1


def trained_parameters(shape: RunShape, architecture: Architecture) -> float:
    """Number of trained parameters on this rank: the adapter's or all, in shards or whole."""
    whole = architecture.lora_parameters(shape.lora_rank) if shape.lora_rank else architecture.parameters
    return whole / shape.num_shards


def parameter_bytes(shape: RunShape, architecture: Architecture) -> float:
    """Bytes of the policy; below an adapter the frozen weights are kept in the precision that they compute in."""
    trained = trained_parameters(shape, architecture) * shape.master_bytes
    frozen = architecture.parameters * shape.compute_bytes / shape.num_shards if shape.lora_rank else 0.0
    return trained + frozen


def gradient_bytes(shape: RunShape, architecture: Architecture) -> float:
    return trained_parameters(shape, architecture) * shape.master_bytes


def optimizer_bytes(shape: RunShape, architecture: Architecture) -> float:
    """Bytes of two moments of AdamW, one of Muon, in the precision of the parameters.

    Muon has the matrices of attention and feed-forward, about two thirds, or nearly all.
    """
    hidden = 2 * architecture.num_layers * architecture.token_parameters / architecture.parameters
    by_muon = 1.0 if shape.muon_scope == "all" or shape.lora_rank else hidden
    moments = 2 - (by_muon if shape.use_muon else 0.0)
    return moments * trained_parameters(shape, architecture) * shape.master_bytes


def ema_bytes(shape: RunShape, architecture: Architecture) -> float:
    """Bytes of a copy of what is trained; it is on the CPU if the anchor is."""
    is_held = shape.ema_decay and not shape.reference_mode_offload
    return trained_parameters(shape, architecture) * shape.master_bytes if is_held else 0.0


def anchor_bytes(shape: RunShape, architecture: Architecture) -> float:
    """Bytes of a copy of what is trained. It takes the policy's place while it is used, and the policy its."""
    return trained_parameters(shape, architecture) * shape.anchor_bytes if shape.has_anchor else 0.0


def working_weight_bytes(shape: RunShape, architecture: Architecture, *, with_gradient: bool) -> float:
    """Bytes of weights in the form that a matrix product takes, and of gradients on their way back into shards.

    FSDP gathers the block that is computed and prefetches the next; the flat buffer of a gather is there next to what
    it is copied into, and the root's own parameters stay gathered. In the backward pass come the block's gradient in
    the computing precision and the float32 buffer that is reduced. Without FSDP autocast keeps a cast copy of every
    weight until the forward pass ends.
    """
    block, root = architecture.block_parameters, architecture.root_parameters
    if not shape.enable_fsdp:
        needs_cast = shape.compute_bytes < shape.master_bytes and not shape.lora_rank
        return architecture.parameters * shape.compute_bytes if needs_cast else 0.0
    gathered = 3 * block if shape.reshard_after_forward else architecture.num_layers * block
    total = (root + gathered) * shape.compute_bytes
    if with_gradient and not shape.lora_rank:
        total += block * (shape.compute_bytes + 4)
    return total


def encoder_bytes(shape: RunShape, architecture: Architecture) -> float:
    """Bytes of encoders, whole on every rank unless conditions are precomputed; 0 for a model whose are not known."""
    if shape.precompute_conditions or not architecture.is_released:
        return 0.0
    vision = _VISION_ENCODER if shape.has_images else 0.0
    return (_LANGUAGE_MODEL + vision) * BYTES[shape.encoder_dtype] + _GLYPH_ENCODER * 4


def vae_bytes(shape: RunShape, architecture: Architecture) -> float:
    """Bytes of the VAE. A convolution grows with the product of its channels, so others are scaled by their squares."""
    channels, released = (sum(c**2 for c in a.vae_channels) for a in (architecture, Architecture()))
    return _VAE * channels / released * BYTES[shape.vae_dtype]


def decoding_bytes(shape: RunShape, architecture: Architecture) -> float:
    """Bytes of the feature maps of a tile, the mask of its attention layer, and the videos."""
    tile = shape.vae_tile_size or max(shape.height, shape.width)
    height, width = min(tile, shape.height), min(tile, shape.width)
    size, videos = BYTES[shape.vae_dtype], shape.decode_batch_size
    feature_map = shape.frames * height * width * architecture.vae_channels[0] * size
    latent_frames = (shape.frames - 1) // architecture.vae_temporal + 1
    tokens = latent_frames * height * width // architecture.vae_spatial**2
    # The tiles, and the video that they are blended into.
    pixels = 2 * 3 * shape.frames * shape.height * shape.width * size
    return videos * (_DECODER_MAPS * feature_map + pixels) + tokens**2 * size


def trajectory_bytes(shape: RunShape, architecture: Architecture) -> float:
    """Bytes of float32 latents before, between and after the steps, means of the steps, and the anchor's means."""
    latent = architecture.latent_channels
    for size in architecture.latent_size(shape.frames, shape.height, shape.width):
        latent *= size
    states = 2 * shape.grpo_sampling_steps + 1
    states += shape.trained_steps if shape.has_anchor and not shape.anchor_in_update else 0
    return 4 * latent * states * shape.rollouts_per_replica
