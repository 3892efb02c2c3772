"""Tests of the DiffusionNFT loss: its gradient, its minimum, the KL terms and the count of clipped
advantages.
"""

from dataclasses import replace

import pytest
import torch

from hyvideo.loss.nft import NFTInputs, nft_terms
from hyvideo.loss.trust_region import KLWeights

SHAPE = (3, 2, 1, 2, 2)
ADVANTAGES = torch.tensor([2.5, 0.0, -1.0])


def inputs(velocity, **others):
    generator = torch.Generator().manual_seed(0)
    target, old = torch.randn(2, *SHAPE, generator=generator)
    fields = {
        "velocity": velocity,
        "old_velocity": old,
        "target": target,
        "advantages": ADVANTAGES,
    } | others
    return NFTInputs(**fields)


def terms_of(batch, coefficient=0.0, **options):
    weights = KLWeights(position=1.0, velocity=0.5)
    return nft_terms(
        batch, advantage_clip=5.0, kl_weights=weights, kl_coefficient=coefficient, **options
    )


def test_the_first_gradient_points_towards_good_rollouts_and_away_from_bad_ones():
    velocity = inputs(None).old_velocity.clone().requires_grad_()
    batch = inputs(velocity)
    terms_of(batch).policy.sum().backward()
    expected = 2 * (ADVANTAGES / 5).view(-1, 1, 1, 1, 1) * (velocity.detach() - batch.target) / 8
    torch.testing.assert_close(velocity.grad, expected)
    assert (velocity.grad[1] == 0).all()  # an advantage of 0 has no gradient


@pytest.mark.parametrize("has_rewards", [True, False])
def test_a_rollout_with_advantage_0_pulls_to_the_old_policy_only_in_a_control_run(has_rewards):
    velocity = torch.zeros(SHAPE, requires_grad=True)
    batch = inputs(velocity)
    terms = terms_of(batch, has_rewards=has_rewards)
    terms.policy.sum().backward()
    pull = 2 * (velocity.detach() - batch.old_velocity)[1] / 8
    torch.testing.assert_close(velocity.grad[1], torch.zeros_like(pull) if has_rewards else pull)
    assert velocity.grad[0].abs().min() > 0 and terms.policy[1] > 0


def test_the_loss_has_its_minimum_at_the_closed_form():
    """The minimum of r |v - t|^2 + (1 - r) |2 o - v - t|^2 is v = o + (2 r - 1) (t - o)."""
    batch = inputs(None)
    best = batch.old_velocity + (ADVANTAGES / 5).view(-1, 1, 1, 1, 1) * (
        batch.target - batch.old_velocity
    )
    velocity = best.clone().requires_grad_()
    terms_of(inputs(velocity)).policy.sum().backward()
    torch.testing.assert_close(velocity.grad, torch.zeros(SHAPE), atol=1e-6, rtol=0)


def test_kl_terms_are_mean_squares_added_with_their_weights():
    batch = inputs(torch.zeros(SHAPE))
    terms = terms_of(
        inputs(torch.zeros(SHAPE), anchor_velocity=torch.full(SHAPE, 2.0)), coefficient=0.1
    )
    torch.testing.assert_close(terms.error, batch.target.square().flatten(1).mean(1))
    torch.testing.assert_close(terms.velocity, batch.old_velocity.square().flatten(1).mean(1))
    torch.testing.assert_close(terms.position, torch.full((3,), 4.0))
    torch.testing.assert_close(
        terms.loss, terms.policy + 0.1 * (terms.position + 0.5 * terms.velocity)
    )


def test_the_distance_has_no_gradient():
    """It is kept until the end of the update, and would keep the graph of every pass."""
    terms = terms_of(inputs(torch.zeros(SHAPE, requires_grad=True)))
    assert (
        terms.policy.requires_grad
        and terms.velocity.requires_grad
        and not terms.distance.requires_grad
    )


@pytest.mark.parametrize("advantage, clipped", [(5.0, True), (-5.0, True), (4.9, False)])
def test_advantages_at_the_clip_are_counted(advantage, clipped):
    batch = inputs(torch.zeros(SHAPE), advantages=torch.full((3,), advantage))
    assert terms_of(batch).is_clipped.all() == clipped


def published_gradient(batch, *, beta=1.0, sigma=None):
    """Return the gradient of DiffusionNFT as published; with ``sigma``, of its errors of the
    predicted video.
    """
    velocity, old = batch.velocity.detach().clone().requires_grad_(), batch.old_velocity
    weight = (1 + ADVANTAGES / 5) / 2
    losses = []
    for prediction in ((1 - beta) * old + beta * velocity, (1 + beta) * old - beta * velocity):
        error = (prediction - batch.target).flatten(1)
        if sigma is None:
            losses.append(error.square().mean(1))
        else:  # x0 = x - sigma v, so that its error is sigma times that of the velocity
            losses.append(
                5 * (sigma * error).square().mean(1) / (sigma * error).abs().mean(1).detach()
            )
    ((weight * losses[0] + (1 - weight) * losses[1]) / beta).sum().backward()
    return velocity.grad


def our_gradient(batch):
    batch = replace(batch, velocity=batch.velocity.detach().clone().requires_grad_())
    terms_of(batch).policy.sum().backward()
    return batch.velocity.grad


def test_beta_scales_only_the_pull_to_the_rollout_policy():
    """docs/methods.md: the gradient is 2 ((2 r - 1) (v_old - u) + beta (v - v_old)), and here 0
    for A = 0.
    """
    start = inputs(None).old_velocity
    torch.testing.assert_close(
        published_gradient(inputs(start), beta=0.1), our_gradient(inputs(start))
    )
    moved = inputs(start + 0.3 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)))
    shift = moved.velocity - moved.old_velocity
    signed = (ADVANTAGES / 5).view(-1, 1, 1, 1, 1) * (moved.old_velocity - moved.target)
    torch.testing.assert_close(published_gradient(moved, beta=0.1), 2 * (signed + 0.1 * shift) / 8)
    with_advantage = (ADVANTAGES != 0).view(-1, 1, 1, 1, 1)
    torch.testing.assert_close(our_gradient(moved), with_advantage * 2 * (signed + shift) / 8)


@pytest.mark.parametrize("sigma, ratio", [(0.8, 17), (0.02, 0.43)])
def test_the_published_weight_of_a_sample_is_proportional_to_the_noise_level(sigma, ratio):
    """docs/methods.md has the formula. The errors are normal with std 0.3; 64 elements vary by a
    tenth.
    """
    target, noise = torch.randn(2, 3, 1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    batch = NFTInputs(target + 0.3 * noise, target + 0.3 * noise, target, ADVANTAGES)
    published, ours = (
        gradient[[0, 2]].flatten(1)
        for gradient in (published_gradient(batch, sigma=sigma), our_gradient(batch))
    )
    torch.testing.assert_close(
        published.norm(dim=1) / ours.norm(dim=1),
        5 * sigma / (0.3 * noise[[0, 2]]).abs().flatten(1).mean(1),
    )
    assert (published.norm(dim=1) / ours.norm(dim=1)).mean().item() == pytest.approx(
        ratio, rel=0.15
    )
    assert torch.cosine_similarity(published, ours).min() > 0.9999


def test_the_contrast_is_the_share_of_the_gradient_beyond_advantage_weighted_regression():
    """The gradient is that of (2 r - 1) |v - t|^2, plus a pull from the old velocity."""
    velocity = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), requires_grad=True)
    batch = inputs(velocity)
    (whole,) = torch.autograd.grad(terms_of(batch).policy.sum(), velocity, retain_graph=True)
    weights = ADVANTAGES / 5
    squares = (velocity - batch.target).square().flatten(1).mean(1)
    (regression,) = torch.autograd.grad((weights * squares).sum(), velocity)
    norms = [x.flatten(1).norm(dim=1) for x in (whole - regression, regression)]
    expected = norms[0] / (norms[0] + norms[1])
    expected[1] = 0.0  # an advantage of 0 has no gradient
    found = terms_of(batch).contrast
    assert not found.requires_grad and 0 < found[0] < found[2] < 1
    torch.testing.assert_close(found, expected)
    assert not terms_of(inputs(batch.old_velocity)).contrast.any()
    control = terms_of(inputs(batch.old_velocity), has_rewards=False).contrast
    assert not control.any()
