"""Tests of noise matching: the chosen eta adds the target variance, or an error says why
none can.
"""

import pytest

from hyvideo.schedulers.noise_matching import matched_eta, parse_target, total_variance
from hyvideo.schedulers.noise_window import parse_window
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import SAMPLERS, schedule, shifted_levels

LEVELS = shifted_levels(20, 5.0)
RUN = dict(num_steps=20, shift=5.0, last_step="stochastic")


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
@pytest.mark.parametrize(
    "target, num_steps, shift, last_step",
    [("sage_grpo:0.5", 20, 5.0, "stochastic"), ("cps:0.2", 100, 7.0, "deterministic")],
)
def test_the_schedule_adds_the_variance_of_the_target(
    sde_type, target, num_steps, shift, last_step
):
    """The variance is computed from the standard deviations that the schedule samples with."""
    levels = {"num_steps": num_steps, "shift": shift, "last_step": last_step}
    named, named_eta = parse_target(target)
    eta = matched_eta(target, sde_type, num_steps=num_steps, shift=shift, last_step=last_step)
    total = sum(step.std**2 for step in Schedule.build(sde_type, eta=eta, **levels).transitions)
    goal = sum(step.std**2 for step in Schedule.build(named, eta=named_eta, **levels).transitions)
    assert total == pytest.approx(goal, rel=1e-6)


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
@pytest.mark.parametrize("text", ["fixed:4:6", "random:5", "sliding:4:6"])
def test_a_window_has_the_variance_of_the_target_on_average_over_iterations(sde_type, text):
    """The mean is over a full period of a sliding window and over all positions of a random one."""
    eta = matched_eta("sage_grpo:0.3", sde_type, sde_window=text, **RUN)
    stds = [
        step.std for step in schedule(sde_type, LEVELS, eta, "stochastic") if step.is_stochastic
    ]
    window, iterations = parse_window(text, len(stds)), range(1, 20 * 20)
    period = (
        next(
            n
            for n in iterations
            if n > 1 and (n - 1) * window.stride % (len(stds) - window.length + 1) == 0
        )
        - 1
    )
    placed = [
        window.steps(list(range(len(stds))), n, lambda count, n=n: (n - 1) % count)
        for n in range(1, period + 1)
    ]
    mean = sum(stds[step] ** 2 for steps in placed for step in steps) / period
    assert mean == pytest.approx(total_variance("sage_grpo", LEVELS, 0.3, "stochastic"))


def test_dance_has_total_variance_eta_squared_and_matches_in_closed_form():
    assert total_variance("dance_grpo", LEVELS, 0.3, "stochastic") == pytest.approx(0.09)
    goal = total_variance("sage_grpo", LEVELS, 0.5, "stochastic")
    assert matched_eta("sage_grpo:0.5", "dance_grpo", **RUN) == pytest.approx(goal**0.5)


def test_the_matched_eta_of_cps_is_the_root_of_an_independent_bisection():
    goal, low, high = total_variance("sage_grpo", LEVELS, 0.5, "stochastic"), 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        too_little = total_variance("cps", LEVELS, middle, "stochastic") < goal
        low, high = (middle, high) if too_little else (low, middle)
    assert matched_eta("sage_grpo:0.5", "cps", **RUN) == pytest.approx(low, abs=1e-12)


@pytest.mark.parametrize(
    "target",
    ["sage_grpo", "ddpm:0.5"],
)
def test_a_malformed_target_raises_an_error(target):
    with pytest.raises(ValueError, match="SAMPLER:ETA"):
        matched_eta(target, "sage_grpo", **RUN)


def test_more_noise_than_cps_has_at_eta_1_raises_an_error_with_the_numbers():
    with pytest.raises(ValueError, match="cps"):
        matched_eta("flow_grpo:2", "cps", **RUN)


def test_a_schedule_without_noise_raises_an_error():
    with pytest.raises(ValueError, match="cps"):
        matched_eta("sage_grpo:0.5", "cps", **RUN | {"num_steps": 1})
