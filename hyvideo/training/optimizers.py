"""AdamW and Muon as one optimizer, with the learning rate schedule."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hyvideo.settings.sections import OptimizerSettings
from hyvideo.training.muon import Muon

MUON_MOMENTUM = 0.95


class Optimizers:
    """AdamW and Muon combined into one optimizer."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        self._owners = {
            p: owner
            for owner in optimizers
            for group in owner.param_groups
            for p in group["params"]
        }

    def step(self, lr: float) -> None:
        """Apply the gradients with learning rate ``lr`` and clear them."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the optimizer state of a parameter; empty before its first step."""
        return dict(self._owners[parameter].state.get(parameter, {}))

    def restore(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Set the optimizer state of a parameter.

        A step count moves to the device where the optimizer keeps it.
        """
        owner = self._owners[parameter]
        on_device = any(
            group.get("fused") or group.get("capturable") for group in owner.param_groups
        )
        owner.state[parameter] = {
            name: value if value.ndim or on_device else value.cpu() for name, value in state.items()
        }


def make_optimizers(
    settings: OptimizerSettings,
    trained: Mapping[str, nn.Parameter],
    dtype: torch.dtype,
    *,
    hidden: str,
) -> Optimizers:
    """Create the optimizers of the trained parameters. Muon computes in ``dtype``.

    ``hidden`` is a regular expression for the blocks' matrices. Other layers see few samples, so
    their gradients have a low rank, which orthogonalization would raise to full rank.
    """
    matrices = {
        name: p
        for name, p in trained.items()
        if settings.optimizer != "adamw" and _is_for_muon(settings, name, p, hidden)
    }
    others = [parameter for name, parameter in trained.items() if name not in matrices]
    optimizers = []
    if others:
        adam = torch.optim.AdamW(
            others,
            lr=settings.learning_rate,
            betas=tuple(settings.betas),
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
            fused=others[0].device.type == "cuda",
        )
        optimizers.append(adam)
    if matrices:
        muon = Muon(
            list(matrices.values()),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            momentum=MUON_MOMENTUM,
            dtype=dtype,
        )
        optimizers.append(muon)
    return Optimizers(*optimizers)


def learning_rate(settings: OptimizerSettings, num_updates: int) -> float:
    """Return the learning rate after ``num_updates`` updates: a linear warm-up, then constant."""
    scale = min(1.0, (num_updates + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    return settings.learning_rate * scale


def _is_for_muon(
    settings: OptimizerSettings, name: str, parameter: nn.Parameter, hidden: str
) -> bool:
    if parameter.ndim < 2:
        return False
    if settings.optimizer == "muon_all":
        return True
    # low-rank factors should not be orthogonalized
    return ".lora_" not in name and re.fullmatch(hidden, name) is not None
