"""Tests of the clipped policy loss."""

import math

import pytest
import torch

from hyvideo.grpo.loss import clipped_policy_loss


def loss_of(log_ratio, advantage, *, weight=1.0, clip_range=0.2):
    """The loss of one term at a log-ratio, and its gradient with respect to the new log-probability."""
    log_prob = torch.tensor([log_ratio - 1.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.5], dtype=torch.float64)
    loss = clipped_policy_loss(
        log_prob, old, torch.tensor([advantage]).double(), torch.tensor([weight]).double(), clip_range=clip_range
    )
    (gradient,) = torch.autograd.grad(loss.terms.sum(), log_prob)
    return loss, gradient.item()


@pytest.mark.parametrize("advantage", [2.0, -3.0, 0.0])
def test_before_an_update_the_ratio_is_1_and_the_gradient_is_that_of_reinforce(advantage):
    loss, gradient = loss_of(0.0, advantage, weight=0.5)
    assert loss.ratio.item() == 1 and not loss.is_clipped.item()
    assert loss.terms.item() == pytest.approx(-0.5 * advantage)
    assert gradient == pytest.approx(-0.5 * advantage)


@pytest.mark.parametrize(
    "ratio, advantage, term, gradient",
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the range
        (0.9, -2.0, 1.8, 1.8),
        (1.5, 2.0, -2.4, 0.0),  # a good rollout already made likelier: no more gain
        (0.5, -2.0, 1.6, 0.0),  # a bad rollout already made rarer: no more gain
        (0.5, 2.0, -1.0, -1.0),  # moved the wrong way: never clipped
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_terms_are_the_pessimistic_of_the_ratio_and_the_clamped_ratio(ratio, advantage, term, gradient):
    loss, found = loss_of(math.log(ratio), advantage)
    assert loss.terms.item() == pytest.approx(term)
    assert found == pytest.approx(gradient)


def test_each_term_is_weighted_by_its_step():
    log_prob, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.1, -2.0, -2.9])
    advantages, weights = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([0.0, 2.0, 5.0])
    plain = clipped_policy_loss(log_prob, old, advantages, torch.ones(3), clip_range=1e-4)
    weighted = clipped_policy_loss(log_prob, old, advantages, weights, clip_range=1e-4)
    torch.testing.assert_close(weighted.terms, weights * plain.terms)


def test_ratio_is_the_new_probability_over_the_old():
    loss, _ = loss_of(math.log(1.25), 1.0)
    assert loss.ratio.item() == pytest.approx(1.25)
    assert not loss.ratio.requires_grad and loss.terms.requires_grad


@pytest.mark.parametrize("log_ratio, is_clipped", [(0.0, False), (5e-5, False), (2e-4, True), (-2e-4, True)])
def test_a_term_counts_as_clipped_outside_the_range(log_ratio, is_clipped):
    assert loss_of(log_ratio, 1.0, clip_range=1e-4)[0].is_clipped.item() is is_clipped
