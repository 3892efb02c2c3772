"""Tests of the scheduler: one batched step, its log-probability, and invalid input."""

import pytest
import torch

from hyvideo.grpo.equalizer import balancing_factors
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from hyvideo.schedulers.transitions import SAMPLERS, schedule, shifted_levels

LATENT = (2, 4, 3, 6, 8)  # (batch, channels, frames, height, width)
FIELDS = ("prev_sample", "log_prob", "prev_sample_mean", "std_dev_t", "pred_original_sample")


@pytest.fixture
def latent():
    """Return a function that draws latents, the same sequence in every test."""
    generator = torch.Generator().manual_seed(0)
    return lambda shape=LATENT: torch.randn(shape, generator=generator)


def make_scheduler(num_steps=20, **settings):
    scheduler = FlowMatchDiscreteScheduler(**settings)
    scheduler.set_timesteps(num_steps)
    return scheduler


# --- closed form -------------------------------------------------------------------------------


def test_timesteps_are_a_thousand_sigmas():
    scheduler = make_scheduler(20, shift=5.0)
    torch.testing.assert_close(scheduler.sigmas, torch.tensor(shifted_levels(20, 5.0)))
    torch.testing.assert_close(scheduler.timesteps, 1000 * scheduler.sigmas[:-1])
    assert scheduler.sigmas.dtype == scheduler.timesteps.dtype == torch.float32
    assert len(scheduler.timesteps) == 20


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
@pytest.mark.parametrize("place", [0, 1, 10, 18])
def test_a_step_is_the_affine_gaussian_transition(latent, sde_type, place):
    scheduler = make_scheduler()
    sample, velocity, noise = latent(), latent(), latent()
    step = schedule(sde_type, shifted_levels(20, 5.0), 0.7, "stochastic")[place]
    output = scheduler.sde_step_with_logprob(
        velocity, sample, scheduler.timesteps[place], eta=0.7, sde_type=sde_type, noise=noise
    )
    torch.testing.assert_close(output.prev_sample_mean, step.a * sample + step.b * velocity)
    torch.testing.assert_close(output.prev_sample, output.prev_sample_mean + step.std * noise)
    torch.testing.assert_close(output.std_dev_t, torch.full((2, 1, 1, 1, 1), step.std))
    torch.testing.assert_close(output.pred_original_sample, sample - scheduler.sigmas[place] * velocity)


@pytest.mark.parametrize("sde_type", ["sage_grpo", "flow_grpo", "dance_grpo"])
def test_log_prob_equals_torch_distributions(latent, sde_type):
    scheduler = make_scheduler()
    output = scheduler.sde_step_with_logprob(
        latent(), latent(), scheduler.timesteps[7], sde_type=sde_type, noise=latent()
    )
    normal = torch.distributions.Normal(output.prev_sample_mean, output.std_dev_t)
    torch.testing.assert_close(output.log_prob, normal.log_prob(output.prev_sample).mean(dim=(1, 2, 3, 4)))


def test_log_prob_of_cps_is_the_negative_squared_distance(latent):
    scheduler = make_scheduler()
    outcome = latent()
    output = scheduler.sde_step_with_logprob(
        latent(), latent(), scheduler.timesteps[7], sde_type="cps", prev_sample=outcome
    )
    expected = -((outcome - output.prev_sample_mean) ** 2).mean(dim=(1, 2, 3, 4))
    torch.testing.assert_close(output.log_prob, expected)


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_log_prob_does_not_depend_on_the_order_of_the_elements(latent, sde_type):
    """Sums in float32 depend on it, and on a GPU the order depends on the shape of the batch."""
    scheduler, shape = make_scheduler(), (4, 4, 5, 32, 48)
    inputs = latent(shape), latent(shape), latent(shape)

    def log_prob(orders):
        v, x, outcome = (values.flatten(1)[:, orders].view(shape) for values in inputs)
        step = scheduler.sde_step_with_logprob(v, x, scheduler.timesteps[7], sde_type=sde_type, prev_sample=outcome)
        return step.log_prob

    size = inputs[0][0].numel()
    expected = log_prob(torch.arange(size))
    for seed in range(4):
        assert torch.equal(log_prob(torch.randperm(size, generator=torch.Generator().manual_seed(seed))), expected)


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
@pytest.mark.parametrize("place", [0, 5, 18])
def test_gradient_norm_equals_autograd(latent, sde_type, place):
    """With noise 1 everywhere, the gradient of the summed log-probability is N_t in every element."""
    scheduler = make_scheduler()
    velocity = latent().requires_grad_()
    output = scheduler.sde_step_with_logprob(
        velocity, latent(), scheduler.timesteps[place], sde_type=sde_type, noise=torch.ones(LATENT)
    )
    (gradient,) = torch.autograd.grad(output.log_prob.sum() * velocity[0].numel(), velocity)
    norm = scheduler.compute_log_prob_grad_norms(sde_type=sde_type)[place]
    torch.testing.assert_close(gradient.abs(), norm.expand(LATENT), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_balancing_factors_follow_from_the_gradient_norms(sde_type):
    scheduler = make_scheduler()
    factors = scheduler.compute_grad_balancing_factors(sde_type=sde_type, eta=0.7)
    norms = scheduler.compute_log_prob_grad_norms(sde_type=sde_type, eta=0.7)
    torch.testing.assert_close(factors, balancing_factors(norms))
    is_stochastic = norms > 0
    median = sorted(norms[is_stochastic].tolist())[(int(is_stochastic.sum()) - 1) // 2]
    torch.testing.assert_close((factors * norms)[is_stochastic], torch.full_like(norms[is_stochastic], median))


# --- properties that GRPO needs ----------------------------------------------------------------


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_ratio_is_exactly_one_before_an_update(latent, sde_type):
    scheduler = make_scheduler()
    sample, velocity = latent(), latent()
    for place in scheduler.stochastic_steps(sde_type=sde_type):
        timestep = scheduler.timesteps[place]
        old = scheduler.sde_step_with_logprob(velocity, sample, timestep, sde_type=sde_type, noise=latent())
        new = scheduler.sde_step_with_logprob(
            velocity, sample, timestep, sde_type=sde_type, prev_sample=old.prev_sample
        )
        assert torch.equal((new.log_prob - old.log_prob).exp(), torch.ones(2))


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_samples_of_a_batch_may_have_different_timesteps(latent, sde_type):
    scheduler = make_scheduler()
    shape = (4, *LATENT[1:])
    sample, velocity, noise = latent(shape), latent(shape), latent(shape)
    timesteps = scheduler.timesteps[[12, 0, 19, 3]]
    together = scheduler.sde_step_with_logprob(velocity, sample, timesteps, sde_type=sde_type, noise=noise)
    for i in range(4):
        one = slice(i, i + 1)
        alone = scheduler.sde_step_with_logprob(
            velocity[one], sample[one], timesteps[i], sde_type=sde_type, noise=noise[one]
        )
        for name in FIELDS:
            torch.testing.assert_close(getattr(together, name)[one], getattr(alone, name), rtol=0, atol=0)


def test_the_gradient_flows_through_the_mean_and_not_through_the_outcome(latent):
    """A sampled outcome moves with the mean; without detaching it, its log-probability would be constant."""
    scheduler = make_scheduler()
    velocity, sample, noise = latent().requires_grad_(), latent(), latent()
    drawn = scheduler.sde_step_with_logprob(velocity, sample, scheduler.timesteps[5], noise=noise)
    scored = scheduler.sde_step_with_logprob(
        velocity, sample, scheduler.timesteps[5], prev_sample=drawn.prev_sample.detach()
    )
    (from_drawn,) = torch.autograd.grad(drawn.log_prob.sum(), velocity, retain_graph=True)
    (from_scored,) = torch.autograd.grad(scored.log_prob.sum(), velocity)
    assert torch.equal(from_drawn, from_scored)
    assert from_scored.abs().max() > 0


def test_increasing_the_log_prob_moves_the_mean_towards_the_outcome(latent):
    scheduler = make_scheduler()
    velocity, sample, outcome = latent().requires_grad_(), latent(), latent()
    before = scheduler.sde_step_with_logprob(velocity, sample, scheduler.timesteps[5], prev_sample=outcome)
    (gradient,) = torch.autograd.grad(before.log_prob.sum(), velocity)
    after = scheduler.sde_step_with_logprob(velocity + gradient, sample, scheduler.timesteps[5], prev_sample=outcome)
    assert (after.prev_sample_mean - outcome).norm() < (before.prev_sample_mean - outcome).norm()


@pytest.mark.parametrize(
    "place, settings",
    [
        (5, dict(eta=0.0)),
        (5, dict(eta=0.0, sde_type="flow_grpo")),
        (5, dict(eta=0.0, sde_type="cps")),
        (5, dict(deterministic=True)),
        (19, dict(sde_type="cps")),
    ],
)
def test_a_deterministic_step_has_no_log_prob(latent, place, settings):
    scheduler = make_scheduler()
    velocity, sample = latent().requires_grad_(), latent()
    output = scheduler.sde_step_with_logprob(velocity, sample, scheduler.timesteps[place], **settings)
    width = scheduler.sigmas[place] - scheduler.sigmas[place + 1]
    torch.testing.assert_close(output.prev_sample, sample - width * velocity)
    assert torch.equal(output.prev_sample, output.prev_sample_mean)
    assert torch.equal(output.std_dev_t, torch.zeros(2, 1, 1, 1, 1))
    assert torch.equal(output.log_prob, torch.zeros(2))
    (gradient,) = torch.autograd.grad(output.log_prob.sum(), velocity, allow_unused=True)
    assert gradient is None or torch.equal(gradient, torch.zeros(LATENT))


def test_a_batch_may_mix_deterministic_and_stochastic_samples(latent):
    scheduler = make_scheduler(last_step="deterministic")
    velocity = latent().requires_grad_()
    output = scheduler.sde_step_with_logprob(velocity, latent(), scheduler.timesteps[[19, 10]], noise=latent())
    (gradient,) = torch.autograd.grad(output.log_prob.sum(), velocity)
    assert output.log_prob[0] == 0 and output.log_prob[1] != 0
    assert torch.equal(output.prev_sample[0], output.prev_sample_mean[0])
    assert gradient.isfinite().all() and gradient[0].abs().max() == 0 and gradient[1].abs().max() > 0


def test_sage_with_100_steps_is_deterministic_only_at_the_first_step(latent):
    scheduler = make_scheduler(100, shift=5.0)
    assert scheduler.stochastic_steps() == list(range(1, 100))
    factors = scheduler.compute_grad_balancing_factors()
    assert factors[0] == 0 and (factors[1:] > 0).all() and factors.isfinite().all()
    sample = latent()
    for timestep in scheduler.timesteps:
        output = scheduler.sde_step_with_logprob(latent(), sample, timestep, noise=latent())
        assert output.log_prob.isfinite().all()
        sample = output.prev_sample
    assert sample.isfinite().all()


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_a_deterministic_last_step_returns_the_predicted_data_and_is_not_trained(latent, sde_type):
    scheduler = make_scheduler(8, last_step="deterministic")
    output = scheduler.sde_step_with_logprob(latent(), latent(), scheduler.timesteps[-1], sde_type=sde_type)
    torch.testing.assert_close(output.prev_sample, output.pred_original_sample)
    assert scheduler.stochastic_steps(sde_type=sde_type) == list(range(7))
    assert scheduler.compute_grad_balancing_factors(sde_type=sde_type)[-1] == 0


def test_cps_does_not_train_its_last_step():
    assert make_scheduler(8).stochastic_steps(sde_type="cps") == list(range(7))


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_std_devs_equal_those_of_the_steps(latent, sde_type):
    scheduler = make_scheduler(8)
    shape = (8, *LATENT[1:])
    output = scheduler.sde_step_with_logprob(latent(shape), latent(shape), scheduler.timesteps, sde_type=sde_type)
    torch.testing.assert_close(scheduler.std_devs(sde_type=sde_type), output.std_dev_t.flatten())


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_bfloat16_inputs_are_computed_in_float32(latent, sde_type):
    scheduler = make_scheduler()
    sample, velocity, noise = latent().bfloat16(), latent().bfloat16(), latent()
    settings = dict(timestep=scheduler.timesteps[4], sde_type=sde_type, noise=noise)
    low = scheduler.sde_step_with_logprob(velocity, sample, **settings)
    full = scheduler.sde_step_with_logprob(velocity.float(), sample.float(), **settings)
    for name in FIELDS:
        assert getattr(low, name).dtype == torch.float32
        assert torch.equal(getattr(low, name), getattr(full, name))


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_a_bfloat16_outcome_is_scored_in_float32(latent, sde_type):
    scheduler, sample, velocity, outcome = make_scheduler(), latent(), latent(), latent().bfloat16()
    settings = dict(timestep=scheduler.timesteps[4], sde_type=sde_type)
    low = scheduler.sde_step_with_logprob(velocity, sample, **settings, prev_sample=outcome)
    full = scheduler.sde_step_with_logprob(velocity, sample, **settings, prev_sample=outcome.float())
    for name in FIELDS:
        assert getattr(low, name).dtype == torch.float32 and torch.equal(getattr(low, name), getattr(full, name))


def test_noise_is_drawn_from_the_generator(latent):
    scheduler = make_scheduler()
    sample, velocity, noise = latent(), latent(), torch.randn(LATENT, generator=torch.Generator().manual_seed(7))
    drawn = scheduler.sde_step_with_logprob(
        velocity, sample, scheduler.timesteps[4], generator=torch.Generator().manual_seed(7)
    )
    given = scheduler.sde_step_with_logprob(velocity, sample, scheduler.timesteps[4], noise=noise)
    assert torch.equal(drawn.prev_sample, given.prev_sample)


def test_set_timesteps_replaces_the_previous_schedule():
    scheduler = make_scheduler(20)
    scheduler.std_devs()
    scheduler.set_timesteps(8)
    torch.testing.assert_close(scheduler.std_devs(), make_scheduler(8).std_devs())


def test_a_scheduler_can_be_saved_and_loaded(tmp_path):
    make_scheduler(shift=3.0, last_step="deterministic").save_pretrained(tmp_path)
    loaded = FlowMatchDiscreteScheduler.from_pretrained(tmp_path)
    assert loaded.config.shift == 3.0 and loaded.config.last_step == "deterministic"


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, -1.0, float("nan")])
def test_shift_must_be_positive(shift):
    with pytest.raises(ValueError, match="shift must be positive"):
        FlowMatchDiscreteScheduler(shift=shift)


def test_last_step_must_be_known():
    with pytest.raises(ValueError, match="last_step must be stochastic or deterministic, got 'none'"):
        FlowMatchDiscreteScheduler(last_step="none")


def test_there_must_be_at_least_one_step():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        make_scheduler(0)


def test_timesteps_must_be_set_first(latent):
    scheduler = FlowMatchDiscreteScheduler()
    with pytest.raises(ValueError, match="call set_timesteps first"):
        scheduler.sde_step_with_logprob(latent(), latent(), 1000.0)
    with pytest.raises(ValueError, match="call set_timesteps first"):
        scheduler.std_devs()


def test_shapes_must_agree(latent):
    with pytest.raises(ValueError, match="model_output must have the shape of sample"):
        make_scheduler().sde_step_with_logprob(latent(), latent((1, *LATENT[1:])), 1000.0)


def test_sde_type_must_be_known(latent):
    with pytest.raises(ValueError, match="sde_type must be one of sage_grpo, .*, got 'ddpm'"):
        make_scheduler().sde_step_with_logprob(latent(), latent(), 1000.0, sde_type="ddpm")


@pytest.mark.parametrize("eta", [-0.1, float("nan"), float("inf")])
def test_eta_must_be_finite_and_not_negative(latent, eta):
    with pytest.raises(ValueError, match=r"eta must be within \[0, 1000\] for sage_grpo"):
        make_scheduler().sde_step_with_logprob(latent(), latent(), 1000.0, eta=eta)


def test_eta_of_cps_must_be_at_most_1(latent):
    with pytest.raises(ValueError, match=r"eta must be within \[0, 1\] for cps, got 1.5"):
        make_scheduler().sde_step_with_logprob(latent(), latent(), 1000.0, eta=1.5, sde_type="cps")


def test_timestep_must_be_in_the_schedule(latent):
    with pytest.raises(ValueError, match="timestep 500.0 is not in the schedule of 20 steps"):
        make_scheduler().sde_step_with_logprob(latent(), latent(), 500.0)


def test_a_timestep_rounded_to_bfloat16_is_not_in_the_schedule(latent):
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match="use a float32 value"):
        scheduler.sde_step_with_logprob(latent(), latent(), scheduler.timesteps[1].bfloat16())


def test_timestep_must_be_a_scalar_or_one_value_per_sample(latent):
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match="one value for each of 2 samples, got 3"):
        scheduler.sde_step_with_logprob(latent(), latent(), scheduler.timesteps[:3])


def test_prev_sample_and_noise_exclude_each_other(latent):
    with pytest.raises(ValueError, match="prev_sample .* and noise .* exclude each other: got both"):
        make_scheduler().sde_step_with_logprob(latent(), latent(), 1000.0, prev_sample=latent(), noise=latent())
