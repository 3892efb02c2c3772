"""Temporal gradient equalizer: per-step loss weights that make the steps' gradients equally large.

Without it the last steps dominate the loss, because the gradient of the log-probability grows by
two orders of magnitude from the first step to the last. Source: arXiv:2603.21872, Section 3.2.1 and
Figure 4; values in docs/sde.md.
"""

import torch
from torch import Tensor


def balancing_factors(grad_norms: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Return ``S_t = median(N) / (N_t + eps)``, or 0 where ``N_t`` is 0.

    Shape: (steps,), input and output.

    The median is taken over the stochastic steps. For an even number of steps it is the lower of
    the two middle values (``torch.median``), as in the code that produced the paper's results.
    """
    is_stochastic = grad_norms > 0
    if not is_stochastic.any():
        return torch.zeros_like(grad_norms)
    median = grad_norms[is_stochastic].median()
    return torch.where(is_stochastic, median / (grad_norms + eps), 0.0)
