"""The anchor and the running average: what is copied, when, and in which direction it moves."""

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


def held(copy):
    return {name: tensor.clone() for name, tensor in copy.tensors().items()}


def values(model):
    return {name: parameter.detach().clone() for name, parameter in trained(model).items()}


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_refresh_copies_the_weights_and_resets_the_age(model):
    anchor = Anchor(model, trained(model), refresh_every=2)
    start = values(model)
    move(model, 1.0)
    anchor.age += 1
    anchor.after_iteration()
    assert anchor.age == 1 and equal(held(anchor), start)
    move(model, 1.0)
    anchor.age += 1
    assert anchor.age == 2 and equal(held(anchor), start)  # never within an iteration
    anchor.after_iteration()
    assert anchor.age == 0 and anchor.equals_policy and equal(held(anchor), values(model))
    at_refresh = values(model)
    move(model, 1.0)
    anchor.age += 1
    assert equal(held(anchor), at_refresh) and not anchor.equals_policy


def test_an_anchor_that_is_fixed_keeps_the_initial_weights(model):
    anchor = Anchor(model, trained(model), refresh_every=None)
    start = values(model)
    for _ in range(5):
        move(model, 1.0)
        anchor.age += 1
        anchor.after_iteration()
    assert anchor.age == 5 and equal(held(anchor), start)


def test_in_place_the_model_computes_as_the_copy_and_is_itself_again_after(model):
    copy = WeightCopy(model, trained(model))
    inputs = torch.ones(1, 3)
    before = model(inputs)
    move(model, 0.5)
    now, after = values(model), model(inputs)
    with copy.in_place():
        assert torch.equal(model(inputs), before)
    assert torch.equal(model(inputs), after) and equal(values(model), now)


def test_the_average_keeps_its_decay_of_itself_and_takes_the_rest_of_the_policy(model):
    copy = WeightCopy(model, trained(model))
    start = values(model)
    move(model, 1.0)
    copy.move_towards(1 - 0.9)  # as of ema_decay 0.9
    for name, tensor in copy.tensors().items():
        torch.testing.assert_close(tensor, start[name] + 0.1)


def test_an_average_that_moves_away_from_the_policy_stops_the_run(model, monkeypatch):
    copy = WeightCopy(model, trained(model))
    move(model, 1.0)
    lerp = torch.Tensor.lerp_
    monkeypatch.setattr(torch.Tensor, "lerp_", lambda part, policy, weight: lerp(part, policy, -weight))
    with pytest.raises(AssertionError, match="away from the policy"):
        copy.move_towards(0.1)


def test_weights_that_are_not_finite_cannot_be_copied(model):
    copy = WeightCopy(model, trained(model))
    move(model, float("nan"))
    with pytest.raises(RuntimeError, match="did not become equal"):
        copy.take()
