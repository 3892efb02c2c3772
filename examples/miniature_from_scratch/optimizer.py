"""Optimizer of the miniature's models, and a training loop's progress bar."""

import torch
from torch import Tensor, nn
from tqdm import tqdm, trange


class MuonAndAdamW:
    """Muon for tensors of two or more dimensions (filters flattened to matrices), AdamW for the
    rest.
    """

    def __init__(
        self, module: nn.Module, *, num_steps: int, warmup: int, decay_from: float, adamw_lr: float
    ):
        self.parameters = trained = [p for p in module.parameters() if p.requires_grad]
        self.matrices = [
            (p, nn.Parameter(p.detach().view(p.shape[0], -1))) for p in trained if p.ndim >= 2
        ]
        vectors = [p for p in trained if p.ndim < 2]
        self.muon = torch.optim.Muon([m for _, m in self.matrices], lr=2e-2, weight_decay=0.0)
        self.adamw = torch.optim.AdamW(vectors, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)

        def scale(step: int) -> float:
            rest = (num_steps - step) / (num_steps * (1 - decay_from))
            return min(1.0, (step + 1) / warmup) * min(1.0, max(0.01, rest))

        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(part, scale) for part in (self.muon, self.adamw)
        ]

    def step(self, loss: Tensor) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for parameter, matrix in self.matrices:
            matrix.grad = None if parameter.grad is None else parameter.grad.view_as(matrix)
        self.muon.step()
        self.adamw.step()
        for schedule in self.schedules:
            schedule.step()


def steps(num_steps: int, title: str) -> tqdm:
    """Return an iterator over the training steps that shows a progress bar."""
    return trange(num_steps, desc=title, unit="step", disable=None)
