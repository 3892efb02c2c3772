"""A small transformer of the real class with nonzero random weights, and inputs for it."""

import torch
from torch import nn

from hyvideo.models.conditions import Condition
from hyvideo.models.family import family_of, install, new_model
from tests.forked import built_once

FAMILY = family_of("WanTransformer3DModel")
SIZES = {
    "num_attention_heads": 3,
    "attention_head_dim": 24,
    "ffn_dim": 128,
    "num_layers": 2,
    "text_dim": 32,
    "freq_dim": 64,
    "in_channels": 4,
    "out_channels": 4,
}
LENGTHS = (7, 19, 1)  # lengths of the texts in tokens


@built_once
def tiny(seed: int = 0, **sizes) -> nn.Module:
    torch.manual_seed(seed)
    model = new_model(FAMILY.transformer, SIZES | sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def installed(seed: int = 0, **sizes) -> nn.Module:
    model = tiny(seed, **sizes)
    install(model)
    return model


def inputs(batch: int = 2, grid: tuple[int, int, int] = (3, 6, 4), seed: int = 1) -> dict:
    """Return arguments of this project's forward pass."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "latents": torch.randn(batch, 4, *grid, generator=generator),
        "timestep": torch.tensor([937.5, 412.25, 55.1])[:batch],
        "conditions": [
            Condition(torch.randn(length, 32, generator=generator)) for length in LENGTHS[:batch]
        ],
    }


def loss_of(out: torch.Tensor) -> torch.Tensor:
    """Return a loss that depends on all values of each sample."""
    weights = torch.linspace(-1, 1, out[0].numel()).view_as(out[0])
    return (out * weights).sum() + (out**2).mean().sqrt()


def gradients(model: nn.Module, **arguments) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model(**arguments)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the relative L2 distance of two gradients."""
    assert found.keys() == expected.keys()
    ours, theirs = (
        torch.cat([each[name].flatten() for name in expected]) for each in (found, expected)
    )
    return ((ours - theirs).norm() / theirs.norm()).item()
