"""``reference_conventions`` against numbers of the public reference at 20 steps, shift 5 and eta 0.5."""

import math

import pytest
import torch

from hyvideo.config.run_plan import make_plan
from hyvideo.config.settings import Config
from hyvideo.grpo.trust_region import KLCoefficient, KLScheduleSettings, position_kl
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from hyvideo.schedulers.transitions import SAMPLERS, shifted_levels

LEVELS = shifted_levels(20, 5.0)


def scheduler(reference_conventions, num_steps=20, last_step="stochastic"):
    made = FlowMatchDiscreteScheduler(5.0, last_step, reference_conventions)
    made.set_timesteps(num_steps)
    return made


@pytest.mark.parametrize(
    "reference_conventions, expected",
    [
        (True, {1: 6.88, 10: 1, 18: 0.155, 19: 0.0803, 20: 4.92e-13}),
        (False, {1: 4.38, 10: 0.898, 18: 0.757, 19: 1.15, 20: 0}),
    ],
)
def test_the_equalizer_of_cps_has_the_factors_of_both_conventions(reference_conventions, expected):
    factors = scheduler(reference_conventions).compute_grad_balancing_factors(sde_type="cps").tolist()
    assert {step: factors[step - 1] for step in expected} == pytest.approx(expected, rel=5e-3, abs=1e-16)


def test_the_median_includes_the_last_step_of_cps_in_the_reference():
    """With 25 steps the lower median of 25 norms is the 13th, and that of the 24 stochastic ones the 12th."""
    made = scheduler(True, num_steps=25)
    norms, factors = (
        getattr(made, name)(sde_type="cps")
        for name in ("compute_log_prob_grad_norms", "compute_grad_balancing_factors")
    )
    assert norms[-1] == pytest.approx(made.sigmas[-2].item() / 1e-12)
    assert factors.tolist() == pytest.approx((norms.sort().values[12] / norms).tolist(), rel=1e-5)


@pytest.mark.parametrize("sde_type", ["sage_grpo", "flow_grpo", "dance_grpo"])
def test_the_equalizer_of_other_samplers_is_the_same(sde_type):
    ours, theirs = (scheduler(is_on).compute_grad_balancing_factors(sde_type=sde_type) for is_on in (False, True))
    assert torch.equal(ours, theirs)


def test_the_kl_of_flow_grpo_omits_the_step_length():
    """The reference divides by 2 (s^2 + 1e-6) with s = eta sqrt(sigma / (1 - sigma)), without the step length."""
    kl = position_kl(torch.full((20, 1, 1, 1, 1), 0.3), torch.zeros(1), stds(sde_type="flow_grpo"))
    for is_on in (False, True):
        weighted = kl * scheduler(is_on).position_kl_weights(sde_type="flow_grpo")
        for step, (sigma, value) in enumerate(zip(LEVELS, weighted.tolist())):
            variance = 0.25 * sigma / (1 - (sigma if step else LEVELS[1]))
            reference = 0.3**2 / (2 * (variance + 1e-6))
            ratio = {0: 96.0, 10: 33.6, 19: 4.8}.get(step, 1 / (sigma - LEVELS[step + 1]))
            assert value == pytest.approx(reference if is_on else ratio * reference, rel=1e-4)


def stds(**sde):
    return scheduler(False).std_devs(**sde).reshape(-1, 1, 1, 1, 1)


@pytest.mark.parametrize("sde_type", ["sage_grpo", "dance_grpo", "cps"])
def test_the_kl_of_other_samplers_is_the_same_where_they_add_noise(sde_type):
    weights = scheduler(True).position_kl_weights(sde_type=sde_type)
    assert weights[:19].tolist() == pytest.approx([1.0] * 19, abs=2e-4)
    # The last step of cps has no noise. The reference divides its KL by 2e-6, `position_kl` by 1e-6.
    assert weights[19].item() == pytest.approx(0.5 if sde_type == "cps" else 1.0, abs=2e-4)
    assert torch.equal(scheduler(False).position_kl_weights(sde_type=sde_type), torch.ones(20))


def test_the_last_step_of_cps_outweighs_the_kl_of_all_others():
    """KL_t of a velocity difference of 1 is (dmean/dv)^2 / (2 std^2). docs/reproduce.md names the ratio."""
    made = scheduler(True)
    kls = [step.b**2 / (2 * step.std**2 + 1e-6) for step in made._transitions("cps", 0.5)]
    weighted = (torch.tensor(kls) * made.position_kl_weights(sde_type="cps")).tolist()
    assert weighted[-1] == pytest.approx(LEVELS[-2] ** 2 / 2e-6)
    assert weighted[-1] / sum(weighted[:-1]) == pytest.approx(17_000, rel=0.02)


@pytest.mark.parametrize(
    "sde_type, settings, number",
    [
        ("cps", {}, 20),
        ("cps", {"reference_conventions": False}, 19),
        ("cps", {"last_step": "deterministic"}, 19),
        ("cps", {"sde_window": "fixed:0:4"}, 4),
        ("cps", {"timestep_fraction": 0.5}, 10),
        ("cps", {"eta": 0.0}, 0),
        ("sage_grpo", {}, 20),
        ("sage_grpo", {"last_step": "deterministic"}, 19),
    ],
)
def test_the_reference_also_trains_the_last_step_of_cps(sde_type, settings, number):
    config = Config().with_settings(**{"sde_type": sde_type, "reference_conventions": True} | settings).resolved()
    rollout = config.rollout
    assert make_plan(config).num_trained_steps == number
    made = scheduler(rollout.reference_conventions, last_step=rollout.last_step)
    if rollout.sde_window:
        made.restrict_noise(range(4))
    trained = made.stochastic_steps(sde_type=sde_type, eta=rollout.eta)
    assert len(trained) * config.loss.timestep_fraction == number
    norms = made.compute_log_prob_grad_norms(sde_type=sde_type, eta=rollout.eta)
    assert norms.nonzero().flatten().tolist() == trained


def test_the_conventions_change_the_loss_and_not_the_samples():
    generator = torch.Generator().manual_seed(0)
    x, v, noise = (torch.randn(2, 1, 4, 4, generator=generator) for _ in range(3))
    for sde_type in SAMPLERS:
        for timestep in scheduler(True).timesteps:
            ours, theirs = (
                scheduler(is_on).sde_step_with_logprob(v, x, timestep, sde_type=sde_type, noise=noise)
                for is_on in (False, True)
            )
            torch.testing.assert_close(ours.prev_sample, theirs.prev_sample, rtol=0, atol=1e-11)
            assert torch.equal(ours.prev_sample_mean, theirs.prev_sample_mean)
            torch.testing.assert_close(ours.log_prob, theirs.log_prob, rtol=0, atol=1e-11)


# --- KL warm-up --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, updates",
    [
        ({}, 2.5),  # the launch line of the reference: 100 / (2 x 20)
        ({"batch_size": 1, "gradient_accumulation_steps": 4}, 1.25),  # configs/paper
        ({"num_updates_per_rollout": 2}, 5),
        ({"timestep_fraction": 0.5}, 5),
        ({"reference_conventions": False}, 100),
        ({"objective": "nft"}, 100),
    ],
)
def test_the_warm_up_counts_pairs_of_a_rollout_and_a_step(settings, updates):
    settings = {"batch_size": 2, "grpo_sampling_steps": 20, "reference_conventions": True} | settings
    assert Config().with_settings(**settings).kl_warmup == updates


@pytest.mark.parametrize("schedule", ["two_stage", "adaptive"])
@pytest.mark.parametrize("updates, expected", [(2.5, [0.4, 0.8, 1, 1]), (0.625, [1, 1]), (2, [0.5, 1, 1])])
def test_a_fractional_warm_up_reaches_the_maximum_in_the_update_in_which_it_ends(schedule, updates, expected):
    settings = KLScheduleSettings(schedule=schedule, initial=0, minimum=0, maximum=1, warmup_updates=updates, target=1)
    coefficient = KLCoefficient(settings)
    for value in expected:
        coefficient.observe(1.0)  # at the target, so the feedback keeps the value
        assert coefficient.value == pytest.approx(value)
    assert coefficient.num_updates > math.ceil(updates)
