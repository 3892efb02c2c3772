"""The temporal gradient equalizer: gradient norms of the log-probability per step become loss weights.

The gradient of the log-probability grows by two orders of magnitude from the first, noisy step to the last; without
weights the loss is trained at the last steps alone, where colour and motion are already decided. Source: method.md, 4.
"""

import torch
from torch import Tensor


def balancing_factors(grad_norms: Tensor, *, eps: float = 1e-8) -> Tensor:
    """``S_t = median(N) / (N_t + eps)``, the median over the stochastic steps; 0 where N_t is 0. Shape: (steps,), both.

    Of an even number of steps the median is the lower of the two in the middle, as ``torch.median`` takes it in the
    code that made the paper's numbers.
    """
    is_stochastic = grad_norms > 0
    if not is_stochastic.any():
        return torch.zeros_like(grad_norms)
    median = grad_norms[is_stochastic].median()
    return torch.where(is_stochastic, median / (grad_norms + eps), 0.0)
