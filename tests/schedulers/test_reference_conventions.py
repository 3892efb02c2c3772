"""``reference_conventions`` against numbers of the public reference at 20 steps, shift 5 and eta
0.5.
"""

import pytest
import torch

from hyvideo.loss.trust_region import position_kl
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import SAMPLERS, shifted_levels
from hyvideo.settings.config import Config
from hyvideo.settings.iteration_plan import make_plan

LEVELS = shifted_levels(20, 5.0)


def build(sde_type, reference_conventions, **changes):
    settings = {
        "num_steps": 20,
        "shift": 5.0,
        "eta": 0.5,
        "reference_conventions": reference_conventions,
    }
    return Schedule.build(sde_type, **settings | changes)


@pytest.mark.parametrize(
    "reference_conventions, expected",
    [
        (True, {1: 6.88, 10: 1, 18: 0.155, 19: 0.0803, 20: 4.92e-13}),
        (False, {1: 4.38, 10: 0.898, 18: 0.757, 19: 1.15, 20: 0}),
    ],
)
def test_the_equalizer_of_cps_has_the_factors_of_both_conventions(reference_conventions, expected):
    factors = build("cps", reference_conventions).equalizer_weights.tolist()
    assert {step: factors[step - 1] for step in expected} == pytest.approx(
        expected, rel=5e-3, abs=1e-16
    )


def test_the_median_includes_the_last_step_of_cps_in_the_reference():
    """With 25 steps the lower median of 25 norms is the 13th, and that of the 24 stochastic ones
    the 12th.
    """
    made = build("cps", True, num_steps=25)
    norms = made.log_prob_grad_norms
    assert norms[-1] == pytest.approx(made.sigmas[-2] / 1e-12)
    assert made.equalizer_weights.tolist() == pytest.approx(
        (norms.sort().values[12] / norms).tolist(), rel=1e-5
    )


@pytest.mark.parametrize("sde_type", ["sage_grpo", "flow_grpo", "dance_grpo"])
def test_the_equalizer_of_other_samplers_is_the_same(sde_type):
    ours, theirs = (build(sde_type, is_on).equalizer_weights for is_on in (False, True))
    assert torch.equal(ours, theirs)


def test_the_kl_of_flow_grpo_omits_the_step_length():
    """The reference divides by 2 (s^2 + 1e-6) with s = eta sqrt(sigma / (1 - sigma)), without the
    step length.
    """
    stds = torch.tensor([step.std for step in build("flow_grpo", False).transitions]).reshape(
        -1, 1, 1, 1, 1
    )
    kl = position_kl(torch.full((20, 1, 1, 1, 1), 0.3), torch.zeros(1), stds)
    for is_on in (False, True):
        weighted = kl * build("flow_grpo", is_on).position_kl_weights
        for step, (sigma, value) in enumerate(zip(LEVELS, weighted.tolist())):
            variance = 0.25 * sigma / (1 - (sigma if step else LEVELS[1]))
            reference = 0.3**2 / (2 * (variance + 1e-6))
            ratio = {0: 96.0, 10: 33.6, 19: 4.8}.get(step, 1 / (sigma - LEVELS[step + 1]))
            assert value == pytest.approx(reference if is_on else ratio * reference, rel=1e-4)


@pytest.mark.parametrize("sde_type", ["sage_grpo", "dance_grpo", "cps"])
def test_the_kl_of_other_samplers_is_the_same_where_they_add_noise(sde_type):
    weights = build(sde_type, True).position_kl_weights
    assert weights[:19].tolist() == pytest.approx([1.0] * 19, abs=2e-4)
    # The last step of cps has no noise. The reference divides its KL by 2e-6, `position_kl` by
    # 1e-6.
    assert weights[19].item() == pytest.approx(0.5 if sde_type == "cps" else 1.0, abs=2e-4)
    assert torch.equal(build(sde_type, False).position_kl_weights, torch.ones(20))


@pytest.mark.parametrize(
    "sde_type, settings, number",
    [
        ("cps", {}, 20),
        ("cps", {"reference_conventions": False}, 19),
        ("cps", {"last_step": "deterministic"}, 19),
        ("cps", {"sde_window": "fixed:0:4"}, 4),
        ("sage_grpo", {"last_step": "deterministic"}, 19),
    ],
)
def test_the_reference_also_trains_the_last_step_of_cps(sde_type, settings, number):
    config = (
        Config()
        .with_settings(**{"sde_type": sde_type, "reference_conventions": True} | settings)
        .resolved()
    )
    rollout = config.rollout
    assert make_plan(config).num_trained_steps == number
    made = build(
        sde_type, rollout.reference_conventions, eta=rollout.eta, last_step=rollout.last_step
    )
    if config.objective.window:
        made = made.with_noise_only_at(range(4))
    trained = made.stochastic_steps
    assert len(trained) * config.objective.timestep_fraction == number
    assert made.log_prob_grad_norms.nonzero().flatten().tolist() == trained


def test_the_conventions_change_the_loss_and_not_the_samples():
    generator = torch.Generator().manual_seed(0)
    x, v, noise = (torch.randn(2, 1, 4, 4, generator=generator) for _ in range(3))
    for sde_type in SAMPLERS:
        for index in range(20):
            ours, theirs = (
                build(sde_type, is_on).step(v, x, index, noise) for is_on in (False, True)
            )
            torch.testing.assert_close(ours.sample, theirs.sample, rtol=0, atol=1e-11)
            assert torch.equal(ours.mean, theirs.mean)
            torch.testing.assert_close(ours.log_prob, theirs.log_prob, rtol=0, atol=1e-11)


# --- KL warm-up -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, updates",
    [
        ({}, 2.5),  # the launch line of the reference: 100 / (2 x 20)
        ({"batch_size": 1, "gradient_accumulation_steps": 4}, 1.25),  # configs/paper
        ({"num_updates_per_rollout": 2}, 5),
        ({"reference_conventions": False}, 100),
    ],
)
def test_the_warm_up_counts_pairs_of_a_rollout_and_a_step(settings, updates):
    settings = {
        "batch_size": 2,
        "grpo_sampling_steps": 20,
        "reference_conventions": True,
    } | settings
    assert Config().with_settings(**settings).kl_warmup == updates
