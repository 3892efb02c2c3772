"""Tests of the GRPO loss: clipped policy loss and KL terms."""

import math

import pytest
import torch

from hyvideo.loss.grpo import LossInputs, clipped_policy_loss, grpo_terms
from hyvideo.loss.trust_region import KLWeights

MEAN = (1, 1, 1, 2, 2)  # shape of one transition's mean


def terms_of(
    log_prob, old, advantages, weights, *, clip_range, kl=(0.0, 0.0), coefficient=0.0, **means
):
    """Return the loss terms of pairs; means default to 0."""
    shape = (len(log_prob), *MEAN[1:])
    inputs = LossInputs(
        log_prob=log_prob,
        mean=means.pop("mean", torch.zeros(shape, dtype=log_prob.dtype)),
        kl_std=torch.full((len(log_prob), 1, 1, 1, 1), 0.5, dtype=log_prob.dtype),
        old_log_prob=old,
        advantages=advantages,
        step_weights=weights,
        **means,
    )
    kl_weights = KLWeights(*kl)
    return grpo_terms(
        inputs, clip_range=clip_range, kl_weights=kl_weights, kl_coefficient=coefficient
    )


def loss_of(log_ratio, advantage, *, weight=1.0, clip_range=0.2):
    """Return the loss terms of one pair and the gradient of its loss with respect to the new
    log-probability.
    """
    log_prob = torch.tensor([log_ratio - 1.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.5], dtype=torch.float64)
    advantages, weights = torch.tensor([advantage]).double(), torch.tensor([weight]).double()
    terms = terms_of(log_prob, old, advantages, weights, clip_range=clip_range)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), log_prob)
    return terms, gradient.item()


@pytest.mark.parametrize("advantage", [2.0, -3.0, 0.0])
def test_before_an_update_the_ratio_is_1_and_the_gradient_equals_reinforce(advantage):
    loss, gradient = loss_of(0.0, advantage, weight=0.5)
    assert loss.ratio.item() == 1 and not loss.is_clipped.item()
    assert loss.policy.item() == pytest.approx(-0.5 * advantage)
    assert gradient == pytest.approx(-0.5 * advantage)


@pytest.mark.parametrize(
    "ratio, advantage, term, gradient",
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the range
        (0.9, -2.0, 1.8, 1.8),
        (1.5, 2.0, -2.4, 0.0),  # a good rollout that is already more likely: clipped
        (0.5, -2.0, 1.6, 0.0),  # a bad rollout that is already less likely: clipped
        (0.5, 2.0, -1.0, -1.0),  # moved in the wrong direction: never clipped
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_terms_are_the_maximum_over_the_ratio_and_the_clamped_ratio(
    ratio, advantage, term, gradient
):
    loss, found = loss_of(math.log(ratio), advantage)
    assert loss.policy.item() == pytest.approx(term)
    assert found == pytest.approx(gradient)


def test_each_term_is_weighted_by_its_step():
    log_prob, old = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.1, -2.0, -2.9])
    advantages, weights = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([0.0, 2.0, 5.0])
    plain, _ = clipped_policy_loss(log_prob, old, advantages, torch.ones(3), clip_range=1e-4)
    weighted, _ = clipped_policy_loss(log_prob, old, advantages, weights, clip_range=1e-4)
    torch.testing.assert_close(weighted, weights * plain)


@pytest.mark.parametrize(
    "log_ratio, is_clipped", [(0.0, False), (5e-5, False), (2e-4, True), (-2e-4, True)]
)
def test_a_term_counts_as_clipped_outside_the_range(log_ratio, is_clipped):
    assert loss_of(log_ratio, 1.0, clip_range=1e-4)[0].is_clipped.item() is is_clipped


def test_the_loss_adds_both_kl_terms_with_their_weights_and_the_coefficient():
    log_prob, old = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.3, -1.9]).double()
    ones = torch.ones(2).double()
    anchor = torch.full((2, *MEAN[1:]), 0.3).double()
    terms = terms_of(
        log_prob,
        old,
        ones,
        ones,
        clip_range=9.0,
        kl=(2.0, 0.5),
        coefficient=0.1,
        anchor_mean=anchor,
    )
    position = 0.3**2 / (2 * 0.5**2 + 1e-6)
    torch.testing.assert_close(terms.position, torch.full((2,), position).double())
    torch.testing.assert_close(terms.velocity, old - log_prob)
    torch.testing.assert_close(terms.kl, 2.0 * terms.position + 0.5 * terms.velocity)
    torch.testing.assert_close(terms.loss, -(log_prob - old).exp() + 0.1 * terms.kl)


def test_the_closed_form_velocity_kl_is_the_kl_to_the_rollout_policy():
    log_prob = torch.tensor([-1.0]).double()
    ones = torch.ones(1).double()
    mean = torch.full(MEAN, 0.2).double().requires_grad_()
    rollout = torch.full(MEAN, -0.1).double()
    terms = terms_of(
        log_prob,
        log_prob,
        ones,
        ones,
        clip_range=9.0,
        kl=(0.0, 1.0),
        coefficient=1.0,
        mean=mean,
        rollout_mean=rollout,
    )
    assert terms.velocity.item() == pytest.approx(0.3**2 / (2 * 0.5**2 + 1e-6))
    (gradient,) = torch.autograd.grad(terms.loss.sum(), mean)
    assert gradient.sum().item() == pytest.approx(2 * 0.3 / (2 * 0.5**2 + 1e-6))


def test_without_an_anchor_the_position_kl_is_0():
    log_prob, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5])
    advantages, weights = torch.tensor([1.0, -1.0]), torch.tensor([1.0, 3.0])
    terms = terms_of(
        log_prob, old, advantages, weights, clip_range=0.2, kl=(1.0, 1.0), coefficient=0.5
    )
    assert terms.position.tolist() == [0.0, 0.0]
    ratio = math.exp(0.5)
    assert terms.policy.tolist() == pytest.approx([-1.0, 3.0 * ratio])
    assert terms.kl.tolist() == terms.velocity.tolist() == pytest.approx([0.0, -0.5])
    assert terms.loss.tolist() == pytest.approx([-1.0, 3.0 * ratio - 0.25])
    assert terms.ratio.tolist() == pytest.approx([1.0, ratio]) and terms.is_clipped.tolist() == [
        False,
        True,
    ]
    assert terms.log_prob.tolist() == [-1.0, -2.0]
