"""The DPO loss: its equation, its gradient, and the form with one graph at a time."""

import math

import pytest
import torch

from hyvideo.loss.dpo import DPOInputs, dpo_terms, dpo_terms_of_videos

SHAPE = (6, 2, 3, 2, 2)  # three pairs
BETA, KL = 7.0, 0.3


def inputs(seed=0):
    random = torch.Generator().manual_seed(seed)
    velocity, anchor, target = (
        torch.randn(SHAPE, generator=random, dtype=torch.float64) for _ in range(3)
    )
    weights = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.5, 1.5], dtype=torch.float64)
    return DPOInputs(velocity.requires_grad_(), anchor, target, weights)


def test_loss_and_gradient_equal_the_equation():
    given = inputs()
    terms = dpo_terms(given, beta=BETA, kl_coefficient=KL)
    terms.loss.mean().backward()
    v, anchor, target = (
        x.detach().flatten(1).tolist()
        for x in (given.velocity, given.anchor_velocity, given.target)
    )
    n = len(v[0])
    expected, gradient = 0.0, []
    for pair in range(3):
        rows = (2 * pair, 2 * pair + 1)
        error = [sum((a - t) ** 2 for a, t in zip(v[row], target[row])) / n for row in rows]
        base = [sum((a - t) ** 2 for a, t in zip(anchor[row], target[row])) / n for row in rows]
        change = [e - b for e, b in zip(error, base)]
        z = -BETA / 2 * (change[0] - change[1])
        weight = given.weights[2 * pair].item()
        kl = [sum((a - b) ** 2 for a, b in zip(v[row], anchor[row])) / n for row in rows]
        expected += (weight * math.log(1 + math.exp(-z)) + KL * sum(kl) / 2) / 3
        slope = weight * BETA / 2 / (1 + math.exp(z))
        for row, sign in zip(rows, (1, -1)):
            of_error = [2 * (a - t) / n for a, t in zip(v[row], target[row])]
            of_kl = [2 * (a - b) / n for a, b in zip(v[row], anchor[row])]
            gradient.append([(sign * slope * e + KL * k / 2) / 3 for e, k in zip(of_error, of_kl)])
        assert terms.margin[2 * pair].item() == pytest.approx(z)
        assert terms.displacement[2 * pair + 1].item() == pytest.approx(change[0])
        assert terms.accuracy[2 * pair].item() == (z > 0)
        contrast = abs(change[0] - change[1]) / sum(base)
        assert terms.contrast[2 * pair].item() == pytest.approx(contrast)
        assert terms.deviation[2 * pair + 1].item() == pytest.approx(abs(change[1]) / base[1])
    assert terms.loss.mean().item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(
        given.velocity.grad.flatten(1), torch.tensor(gradient, dtype=torch.float64)
    )


def test_equal_videos_have_the_loss_log_2_and_no_gradient():
    found = inputs()
    velocity = found.velocity.detach()[:1].requires_grad_()
    anchor, target = (
        tensor[:1].expand(2, *SHAPE[1:]) for tensor in (found.anchor_velocity, found.target)
    )
    given = DPOInputs(
        velocity.expand(2, *SHAPE[1:]), anchor, target, torch.ones(2, dtype=torch.float64)
    )
    terms = dpo_terms(given, beta=BETA, kl_coefficient=0.0)
    terms.loss.mean().backward()
    assert terms.loss.tolist() == [math.log(2)] * 2
    assert not velocity.grad.any()
    assert terms.accuracy.tolist() == [0.5, 0.5]


def test_at_the_base_model_the_slope_is_a_quarter_of_beta():
    given = inputs()
    given = DPOInputs(
        given.anchor_velocity.clone().requires_grad_(),
        given.anchor_velocity,
        given.target,
        given.weights,
    )
    terms = dpo_terms(given, beta=BETA, kl_coefficient=KL)
    terms.loss.sum().backward()
    assert terms.margin.tolist() == terms.deviation.tolist() == [0.0] * 6
    per_element = 2 * (given.velocity - given.target).detach() / given.velocity[0].numel()
    signs = torch.tensor([1.0, -1.0] * 3, dtype=torch.float64) * given.weights
    # twice: the loss of a pair counts for both rows
    expected = 2 * BETA / 4 * signs.view(-1, 1, 1, 1, 1) * per_element
    torch.testing.assert_close(given.velocity.grad, expected)


def test_one_video_at_a_time_has_the_same_values_and_gradient():
    given, single = inputs(), inputs()
    whole = dpo_terms(given, beta=BETA, kl_coefficient=KL)
    whole.loss.sum().backward()
    errors = [
        (x.detach() - given.target).square().flatten(1).mean(1)
        for x in (given.velocity, given.anchor_velocity)
    ]
    of_pairs = [error.view(-1, 2).repeat_interleave(2, dim=0) for error in errors]
    for row in range(6):
        part = slice(row, row + 1)
        own = DPOInputs(
            single.velocity[part],
            single.anchor_velocity[part],
            single.target[part],
            single.weights[part],
        )
        terms = dpo_terms_of_videos(
            own,
            of_pairs[0][part],
            of_pairs[1][part],
            torch.tensor([row % 2 == 0]),
            beta=BETA,
            kl_coefficient=KL,
        )
        terms.loss.sum().backward()
        for name, value in vars(terms).items():
            torch.testing.assert_close(value[0], getattr(whole, name)[row], msg=name)
    torch.testing.assert_close(single.velocity.grad, given.velocity.grad)
