"""Tests of the schedule: one batched step, its log-probability, and invalid input."""

import pytest
import torch

from hyvideo.loss.equalizer import balancing_factors
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import SAMPLERS, schedule, shifted_levels

LATENT = (2, 4, 3, 6, 8)  # (batch, channels, frames, height, width)
FIELDS = ("sample", "log_prob", "mean", "std")


@pytest.fixture
def latent():
    """Return a function that draws latents, the same sequence in every test."""
    generator = torch.Generator().manual_seed(0)
    return lambda shape=LATENT: torch.randn(shape, generator=generator)


def build(sde_type="sage_grpo", num_steps=20, **settings):
    return Schedule.build(sde_type, **{"num_steps": num_steps, "shift": 5.0, "eta": 0.5} | settings)


# --- closed form -------------------------------------------------------------------------------


def test_timesteps_are_a_thousand_levels():
    found = build()
    levels = torch.tensor(shifted_levels(20, 5.0))
    torch.testing.assert_close(torch.tensor(found.sigmas), levels)
    torch.testing.assert_close(found.timesteps, 1000 * levels[:-1])
    torch.testing.assert_close(found.ends, 1000 * levels[1:])
    assert found.timesteps.dtype == found.ends.dtype == torch.float32
    assert len(found.timesteps) == len(found.transitions) == 20


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
@pytest.mark.parametrize("index", [0, 10])
def test_a_step_is_the_affine_gaussian_transition(latent, sde_type, index):
    sample, velocity, noise = latent(), latent(), latent()
    step = schedule(sde_type, shifted_levels(20, 5.0), 0.7, "stochastic")[index]
    output = build(sde_type, eta=0.7).step(velocity, sample, index, noise)
    torch.testing.assert_close(output.mean, step.a * sample + step.b * velocity)
    torch.testing.assert_close(output.sample, output.mean + step.std * noise)
    torch.testing.assert_close(output.std, torch.full((2, 1, 1, 1, 1), step.std))


def test_log_prob_of_cps_is_the_negative_squared_distance(latent):
    next_sample = latent()
    output = build("cps").replay(latent(), latent(), [7, 7], next_sample)
    expected = -((next_sample - output.mean) ** 2).mean(dim=(1, 2, 3, 4))
    torch.testing.assert_close(output.log_prob, expected)


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_log_prob_does_not_depend_on_the_order_of_the_elements(latent, sde_type):
    """Sums in float32 depend on it, and on a GPU the order depends on the shape of the batch."""
    made, shape = build(sde_type), (4, 4, 5, 32, 48)
    inputs = latent(shape), latent(shape), latent(shape)

    def log_prob(orders):
        v, x, next_sample = (values.flatten(1)[:, orders].view(shape) for values in inputs)
        return made.replay(v, x, [7] * 4, next_sample).log_prob

    size = inputs[0][0].numel()
    expected = log_prob(torch.arange(size))
    for seed in range(4):
        assert torch.equal(
            log_prob(torch.randperm(size, generator=torch.Generator().manual_seed(seed))), expected
        )


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_equalizer_weights_follow_from_the_gradient_norms(sde_type):
    made = build(sde_type, eta=0.7)
    weights, norms = made.equalizer_weights, made.log_prob_grad_norms
    torch.testing.assert_close(weights, balancing_factors(norms))
    is_stochastic = norms > 0
    median = sorted(norms[is_stochastic].tolist())[(int(is_stochastic.sum()) - 1) // 2]
    torch.testing.assert_close(
        (weights * norms)[is_stochastic], torch.full_like(norms[is_stochastic], median)
    )


# --- properties that GRPO needs ----------------------------------------------------------------


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_ratio_is_exactly_one_before_an_update(latent, sde_type):
    made = build(sde_type)
    sample, velocity = latent(), latent()
    for index in made.stochastic_steps:
        old = made.step(velocity, sample, index, latent())
        new = made.replay(velocity, sample, [index] * 2, old.sample)
        assert torch.equal((new.log_prob - old.log_prob).exp(), torch.ones(2))


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_samples_of_a_batch_may_be_at_different_steps(latent, sde_type):
    made = build(sde_type)
    shape, indices = (4, *LATENT[1:]), [12, 0, 19, 3]
    sample, velocity, next_sample = latent(shape), latent(shape), latent(shape)
    together = made.replay(velocity, sample, indices, next_sample)
    for row, index in enumerate(indices):
        one = slice(row, row + 1)
        alone = made.replay(velocity[one], sample[one], [index], next_sample[one])
        for name in FIELDS:
            assert torch.equal(getattr(together, name)[one], getattr(alone, name))


def test_the_gradient_flows_through_the_mean_and_not_through_the_outcome(latent):
    """A sampled next_sample moves with the mean; without detaching it, its log-probability would be
    constant.
    """
    made = build()
    velocity, sample, noise = latent().requires_grad_(), latent(), latent()
    drawn = made.step(velocity, sample, 5, noise)
    scored = made.replay(velocity, sample, [5, 5], drawn.sample.detach())
    (from_drawn,) = torch.autograd.grad(drawn.log_prob.sum(), velocity, retain_graph=True)
    (from_scored,) = torch.autograd.grad(scored.log_prob.sum(), velocity)
    assert torch.equal(from_drawn, from_scored)
    assert from_scored.abs().max() > 0


@pytest.mark.parametrize(
    "index, made",
    [
        (5, build(eta=0.0)),
        (5, build("flow_grpo", eta=0.0)),
        (5, build("cps", eta=0.0)),
        (5, Schedule.ode(20, 5.0)),
        (5, build("dance_grpo").with_noise_only_at([4, 6])),
        (19, build("cps")),
    ],
)
def test_a_deterministic_step_is_that_of_the_ode_and_has_no_log_prob(latent, index, made):
    velocity, sample = latent().requires_grad_(), latent()
    output = made.step(velocity, sample, index, None)
    width = made.sigmas[index] - made.sigmas[index + 1]
    torch.testing.assert_close(output.sample, sample - width * velocity)
    assert torch.equal(output.sample, output.mean)
    assert torch.equal(output.std, torch.zeros(2, 1, 1, 1, 1))
    assert torch.equal(output.log_prob, torch.zeros(2))
    (gradient,) = torch.autograd.grad(output.log_prob.sum(), velocity, allow_unused=True)
    assert gradient is None or torch.equal(gradient, torch.zeros(LATENT))


def test_a_batch_may_mix_deterministic_and_stochastic_samples(latent):
    made = build(last_step="deterministic")
    velocity = latent().requires_grad_()
    output = made.replay(velocity, latent(), [19, 10], latent())
    (gradient,) = torch.autograd.grad(output.log_prob.sum(), velocity)
    assert output.log_prob[0] == 0 and output.log_prob[1] != 0
    assert (
        gradient.isfinite().all() and gradient[0].abs().max() == 0 and gradient[1].abs().max() > 0
    )


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_a_window_keeps_its_steps_and_makes_the_others_deterministic(sde_type):
    whole = build(sde_type, 8)
    window = whole.with_noise_only_at([2, 3])
    assert window.stochastic_steps == [2, 3] and whole.stochastic_steps[:4] == [0, 1, 2, 3]
    assert window.transitions[2:4] == whole.transitions[2:4]
    assert window.equalizer_weights.nonzero().flatten().tolist() == [2, 3]
    assert torch.equal(window.timesteps, whole.timesteps)


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_bfloat16_inputs_are_computed_in_float32(latent, sde_type):
    made = build(sde_type)
    sample, velocity, noise, next_sample = (
        latent().bfloat16(),
        latent().bfloat16(),
        latent(),
        latent().bfloat16(),
    )
    pairs = (
        (
            made.step(velocity, sample, 4, noise),
            made.step(velocity.float(), sample.float(), 4, noise),
        ),
        (
            made.replay(velocity, sample, [4, 4], next_sample),
            made.replay(velocity.float(), sample.float(), [4, 4], next_sample.float()),
        ),
    )
    for low, full in pairs:
        for name in FIELDS:
            assert getattr(low, name).dtype == torch.float32
            assert torch.equal(getattr(low, name), getattr(full, name))


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [-0.1, float("nan")])
def test_eta_must_be_finite_and_not_negative(eta):
    with pytest.raises(ValueError, match="eta .* sage_grpo"):
        build(eta=eta)
