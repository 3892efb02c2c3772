"""Muon against its definition, in one process and on sharded matrices."""

import pytest
import torch

from hyvideo.training.muon import Muon, orthogonal
from tests.distributed.launch import launch


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_orthogonalization_brings_singular_values_near_one_and_keeps_the_singular_vectors(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrix)
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    aligned = u.T @ found @ vt.T
    assert (aligned - aligned.diag().diag()).abs().max() < 1e-4
    assert 0.6 < aligned.diag().min() and aligned.diag().max() < 1.25


def test_a_step_is_orthogonalized_nesterov_momentum_with_the_size_of_adams_steps():
    weight = torch.nn.Parameter(torch.randn(8, 32, generator=torch.Generator().manual_seed(1)))
    start = weight.detach().clone()
    optimizer = Muon([weight], lr=0.1, weight_decay=0.5, momentum=0.9, dtype=torch.float32)
    first, second = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(2))
    expected, momentum = start, torch.zeros_like(start)
    for gradient in (first, second):
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        nesterov = 0.1 * gradient + 0.9 * momentum
        expected = (1 - 0.1 * 0.5) * expected - 0.1 * 0.2 * 32**0.5 * orthogonal(nesterov)
    torch.testing.assert_close(weight.detach(), expected)
    rms = (orthogonal(first) * 0.2 * 32**0.5).square().mean().sqrt()
    assert 0.15 < rms < 0.25  # AdamW's updates have a root mean square of about 0.2 learning rates


def sharded_step():
    """Return the largest deviation of sharded from unsharded steps, with rows that divide evenly
    and others.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    from hyvideo.distributed import mesh as ranks

    mesh = ranks.start(1, torch.device("cpu"))
    worst = 0.0
    for shape in ((8, 6), (7, 12), (1, 5), (4, 2, 3)):
        weight, *gradients = torch.randn(4, *shape, generator=torch.Generator().manual_seed(3))
        whole = torch.nn.Parameter(weight.clone())
        shard = torch.nn.Parameter(distribute_tensor(weight, mesh.shards, [Shard(0)]))
        optimizers = [Muon([weight], lr=0.1, dtype=torch.float32) for weight in (whole, shard)]
        for gradient in gradients:
            whole.grad, shard.grad = (
                gradient.clone(),
                distribute_tensor(gradient, mesh.shards, [Shard(0)]),
            )
            for optimizer in optimizers:
                optimizer.step()
        worst = max(worst, (shard.full_tensor() - whole).abs().max().item())
    return worst


def test_sharded_steps_equal_unsharded_steps():
    assert launch("tests.training.test_muon:sharded_step", 2) == [0.0, 0.0]
