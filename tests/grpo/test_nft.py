"""Tests of the DiffusionNFT loss: its gradient, its minimum, the KL terms and the count of clipped advantages."""

import pytest
import torch

from hyvideo.grpo.loss import LossTerms
from hyvideo.grpo.nft import NFTInputs, nft_terms
from hyvideo.grpo.trust_region import kl_weights

SHAPE = (3, 2, 1, 2, 2)
ADVANTAGES = torch.tensor([2.5, 0.0, -1.0])


def inputs(velocity, **others):
    generator = torch.Generator().manual_seed(0)
    target, old = torch.randn(2, *SHAPE, generator=generator)
    fields = {"velocity": velocity, "old_velocity": old, "target": target, "advantages": ADVANTAGES} | others
    return NFTInputs(**fields)


def terms_of(batch, coefficient=0.0):
    weights = kl_weights("dual_moving", dual_position=1.0, dual_velocity=0.5)
    return nft_terms(batch, advantage_clip=5.0, kl_weights=weights, kl_coefficient=coefficient)


def test_the_first_gradient_points_towards_good_rollouts_and_away_from_bad_ones():
    velocity = inputs(None).old_velocity.clone().requires_grad_()
    batch = inputs(velocity)
    terms_of(batch).policy.sum().backward()
    expected = 2 * (ADVANTAGES / 5).view(-1, 1, 1, 1, 1) * (velocity.detach() - batch.target) / 8
    torch.testing.assert_close(velocity.grad, expected)
    assert (velocity.grad[1] == 0).all()  # an advantage of 0 has no gradient


def test_the_loss_has_its_minimum_at_the_closed_form():
    """The minimum of r |v - t|^2 + (1 - r) |2 o - v - t|^2 is v = o + (2 r - 1) (t - o)."""
    batch = inputs(None)
    best = batch.old_velocity + (ADVANTAGES / 5).view(-1, 1, 1, 1, 1) * (batch.target - batch.old_velocity)
    velocity = best.clone().requires_grad_()
    terms_of(inputs(velocity)).policy.sum().backward()
    torch.testing.assert_close(velocity.grad, torch.zeros(SHAPE), atol=1e-6, rtol=0)


def test_kl_terms_are_mean_squares_added_with_their_weights():
    batch = inputs(torch.zeros(SHAPE))
    terms = terms_of(inputs(torch.zeros(SHAPE), anchor_velocity=torch.full(SHAPE, 2.0)), coefficient=0.1)
    torch.testing.assert_close(terms.velocity, batch.old_velocity.square().flatten(1).mean(1))
    torch.testing.assert_close(terms.position, torch.full((3,), 4.0))
    torch.testing.assert_close(terms.loss, terms.policy + 0.1 * (terms.position + 0.5 * terms.velocity))
    assert len(terms.sums()) == len(LossTerms.SUMMED)


def test_the_ratio_is_1_before_an_update():
    batch = inputs(inputs(None).old_velocity)
    assert terms_of(batch).largest_deviation() == 0
    assert terms_of(inputs(2 * batch.velocity)).largest_deviation() > 0.1


@pytest.mark.parametrize("advantage, clipped", [(5.0, True), (-5.0, True), (4.9, False)])
def test_advantages_at_the_clip_are_counted(advantage, clipped):
    batch = inputs(torch.zeros(SHAPE), advantages=torch.full((3,), advantage))
    assert terms_of(batch).is_clipped.all() == clipped
