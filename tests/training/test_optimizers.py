"""Optimizers of a run combined into one."""

import pytest
import torch

from hyvideo.training.optimizers import Optimizers


@pytest.mark.parametrize("start", [0.5, torch.tensor(0.5)])
def test_the_learning_rate_is_set_in_optimizers_that_store_it_as_a_number_or_as_a_tensor(start):
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    sgd = torch.optim.SGD([weight], lr=start, foreach=False)
    Optimizers(sgd).step(0.25)
    assert weight.tolist() == [-0.25, -0.25] and weight.grad is None
    assert type(sgd.param_groups[0]["lr"]) is type(start)
