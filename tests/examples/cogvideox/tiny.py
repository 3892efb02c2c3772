"""A small transformer of CogVideoX and inputs for it, and small checkpoints, also with odd ratios."""

from pathlib import Path

import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXTransformer3DModel
from torch import Tensor

from examples.cogvideox import thin
from hyvideo.models.conditions import Condition
from hyvideo.models.family import install
from tests.registered import registered

MODULE = "examples.cogvideox"
FOLDER = "examples/cogvideox"
VERSION = "cogvideox_2b"
PROMPTS = ["a red car turns left", "a car turns"]
WORDS = ("▁a", "▁red", "▁car", "▁turns", "▁left")
CHARACTERS = "▁abcdefghijklmnopqrstuvwxyz"
TEXT_LENGTH = 9  # released: 226
TIMES = (937, 412, 55)  # of diffusers' scheduler


def write_cogvideox(root: Path, *, odd: bool = False, num_heads: int = 3) -> Path:
    """Write a small checkpoint and return ``root``; with ``odd``, the VAE's temporal ratio is 2
    instead of 4, and its spatial ratio 4 instead of 8.
    """
    vae = thin.vae_settings()
    if odd:
        vae["temporal_compression_ratio"] = 2
        vae["block_out_channels"] = [8] * 3
        vae["down_block_types"] = ["CogVideoXDownBlock3D"] * 3
        vae["up_block_types"] = ["CogVideoXUpBlock3D"] * 3
    thin.write_checkpoint(root, thin.transformer_settings(num_heads), vae, WORDS, CHARACTERS)
    return root


def tiny(**settings) -> CogVideoXTransformer3DModel:
    settings = {"max_text_seq_length": TEXT_LENGTH} | settings
    model = CogVideoXTransformer3DModel(**thin.transformer_settings(3) | settings)
    return thin.drawn(model, 0)


def installed(**settings) -> CogVideoXTransformer3DModel:
    model = tiny(**settings)
    install(model)
    return model


def schedule() -> CogVideoXDDIMScheduler:
    """Return diffusers' scheduler with the released settings."""
    return CogVideoXDDIMScheduler(**thin.SCHEDULER)


def noise_levels() -> Tensor:
    """Return this project's noise level of each time of diffusers' scheduler, in float64.

    Shape: (1000,).
    """
    data = schedule().alphas_cumprod.double().sqrt()
    noise = (1 - schedule().alphas_cumprod.double()).sqrt()
    return noise / (data + noise)


def inputs(batch: int = 2, grid: tuple[int, int, int] = (3, 6, 4)) -> dict:
    """Return arguments of this project's forward pass."""
    generator = torch.Generator().manual_seed(1)
    return {
        "latents": torch.randn(batch, 16, *grid, generator=generator),
        "timestep": (1000 * noise_levels()[list(TIMES[:batch])]).float(),
        "conditions": [
            Condition(torch.randn(TEXT_LENGTH, 32, generator=generator)) for _ in range(batch)
        ],
    }


def stock_velocity(model: CogVideoXTransformer3DModel, latents, timestep, conditions) -> Tensor:
    """Return noise less data, as estimated by diffusers' forward pass and scheduler.

    The estimates are the formulas of `CogVideoXDDIMScheduler.step`.
    """
    times = [int((noise_levels() - sigma / 1000).abs().argmin()) for sigma in timestep.double()]
    squares = schedule().alphas_cumprod.double()[times].view(-1, 1, 1, 1, 1)
    data, noise = squares.sqrt(), (1 - squares).sqrt()
    sample = (latents * (data + noise)).float()
    texts = torch.stack([condition.text for condition in conditions])
    output = model(sample.transpose(1, 2), texts, torch.tensor(times), return_dict=False)[0]
    prediction = output.transpose(1, 2).double()
    estimated_data = data * sample - noise * prediction
    estimated_noise = data * prediction + noise * sample
    return (estimated_noise - estimated_data).float()


def velocity_of_ranks(sp_size: int) -> tuple[list[float], dict[str, list[float]]]:
    """Return the velocity and the gradients of a loss on one of ``sp_size`` ranks."""
    from hyvideo.distributed import mesh as ranks
    from hyvideo.distributed.sequence_parallel import SplitSequence

    with registered(MODULE):
        mesh = ranks.start(sp_size, torch.device("cpu"))
        model = tiny()
        install(model, SplitSequence(mesh.sp_group))
        velocity = model(**inputs())
        velocity.square().sum().backward()
        gradients = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        for gradient in gradients.values():
            torch.distributed.all_reduce(gradient, group=mesh.sp_group)
        return velocity.flatten().tolist(), {
            name: (gradient / sp_size).flatten().tolist() for name, gradient in gradients.items()
        }
