"""Muon: an optimizer with orthogonalized momentum and AdamW's update size, also for sharded
matrices.

    M <- momentum M + (1 - momentum) G          U = orthogonal(G + momentum (M - G))   (Nesterov)
    W <- (1 - lr * weight_decay) W - lr * 0.2 sqrt(max(rows, columns)) U

``orthogonal`` is five Newton-Schulz steps (K. Jordan, 2024). The factor gives updates the root mean
square of AdamW's, so that both optimizers can use one learning rate (Liu et al., "Muon is
scalable", 2025). A sharded matrix is gathered once, and every rank keeps its part of the result.
"""

import math

import torch
from torch import Tensor, nn

from hyvideo.distributed.sharded_tensors import copy_full, full_tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


class Muon(torch.optim.Optimizer):
    """Optimizer for matrices; dimensions after the first are flattened, and count as columns.

    Newton-Schulz steps compute in ``dtype``.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        *,
        lr: float,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.bfloat16,
    ):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: nn.Parameter, group: dict) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        direction = full_tensor(gradient.lerp(state["momentum"], group["momentum"]))
        matrix = direction.flatten(1)
        update = torch.zeros_like(parameter)
        copy_full(update, orthogonal(matrix.to(self.dtype)).view(direction.shape))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the matrix with its singular values moved near 1 (between 0.7 and 1.2).

    Shape: (rows, columns).
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x
