"""Sampling in gradient mode, so that compiled blocks run the graph of training instead of one for
inference.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def graphs_of_training(transformer: nn.Module) -> Iterator[None]:
    """Enable gradients within the context, and let the transformer drop each block's autograd graph
    at its end.
    """
    transformer.detaches_blocks = True
    try:
        with torch.enable_grad():
            yield
    finally:
        transformer.detaches_blocks = False


def detached(tokens: Tensor) -> Tensor:
    """Return tokens without their autograd graph.

    They require a gradient if they did, as inputs in training do.
    """
    return tokens.detach().requires_grad_(tokens.requires_grad)
