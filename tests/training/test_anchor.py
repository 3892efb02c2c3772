"""Anchor and EMA: what is copied, when, and the direction of the EMA."""

import pytest
import torch
from torch import nn

from hyvideo.training.anchor import Anchor, WeightCopy


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def trained(model):
    return dict(model.named_parameters())


@torch.no_grad()
def move(model, by):
    for parameter in model.parameters():
        parameter.add_(by)


def copied(copy):
    return {name: tensor.clone() for name, tensor in copy.tensors().items()}


def values(model):
    return {name: parameter.detach().clone() for name, parameter in trained(model).items()}


def equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_refresh_copies_the_weights_and_resets_the_age(model):
    anchor = Anchor(model, trained(model), refresh_every=2)
    start = values(model)
    move(model, 1.0)
    anchor.age += 1
    anchor.after_iteration()
    assert anchor.age == 1 and equal(copied(anchor), start)
    move(model, 1.0)
    anchor.age += 1
    assert anchor.age == 2 and equal(copied(anchor), start)  # no refresh within an iteration
    anchor.after_iteration()
    assert anchor.age == 0 and anchor.equals_policy and equal(copied(anchor), values(model))
    at_refresh = values(model)
    move(model, 1.0)
    anchor.age += 1
    assert equal(copied(anchor), at_refresh) and not anchor.equals_policy


def test_the_model_uses_the_copy_inside_the_context_and_its_own_weights_after_it(model):
    copy = WeightCopy(model, trained(model))
    inputs = torch.ones(1, 3)
    before = model(inputs)
    move(model, 0.5)
    now, after = values(model), model(inputs)
    with copy.swapped_in():
        assert torch.equal(model(inputs), before)
    assert torch.equal(model(inputs), after) and equal(values(model), now)
