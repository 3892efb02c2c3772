"""The optimizer of a run and its learning rate."""

import torch
from torch import nn

from hyvideo.config import OptimizerSettings


def make_optimizer(settings: OptimizerSettings, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
    )


def learning_rate(settings: OptimizerSettings, num_updates: int) -> float:
    """Of the update after ``num_updates``: it rises linearly over the warm-up and stays."""
    warmth = min(1.0, (num_updates + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    return settings.learning_rate * warmth
