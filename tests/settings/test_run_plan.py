"""Plan of a run."""

import pytest

from hyvideo.models.guidance import Guidance, parse_interval
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import shifted_levels
from hyvideo.settings.iteration_plan import make_plan, num_stochastic_steps
from hyvideo.settings.plan_text import describe


def test_the_plan_reports_whether_the_clip_can_bind(tiny_config):
    assert not make_plan(tiny_config).clip_can_bind
    twice = tiny_config.with_settings(num_updates_per_rollout=2)
    assert make_plan(twice).clip_can_bind


def test_deterministic_steps_of_sage_are_not_counted(tiny_config):
    config = tiny_config.with_settings(grpo_sampling_steps=100, shift=5.0, last_step="stochastic")
    assert num_stochastic_steps(config.sampling, "") == 99


def test_too_much_noise_in_a_step_prints_a_warning(tiny_config):
    for sde_type, eta, is_too_much in (
        ("sage_grpo", 50.0, True),
        ("sage_grpo", 1.0, False),
        ("cps", 1.0, False),
    ):
        config = tiny_config.with_settings(
            sde_type=sde_type, eta=eta, grpo_sampling_steps=20, shift=5.0
        )
        text = describe(config, make_plan(config))
        assert (f"WARNING                eta {eta:g}" in text) == is_too_much


def test_a_level_at_the_bound_of_a_guidance_interval_is_guided_in_the_plan_and_in_the_run(
    tiny_config,
):
    """Levels are float64 in the plan and float32 in the run, and both round numbers such as 0.6."""
    num_bounds = 0
    for steps in range(4, 25, 4):
        for shift in (1.0, 2.0, 3.0, 5.0):
            levels = shifted_levels(steps, shift)[:-1]
            timesteps = Schedule.ode(steps, shift).timesteps.tolist()
            for number, level in enumerate(levels):
                bound = round(level, 3)
                if abs(level - bound) > 1e-9 or not 0 < bound < 1:
                    continue
                num_bounds += 1
                for interval, expected in (
                    (f"0:{bound}", [1] * number + [2] * (steps - number)),
                    (f"{bound}:1", [2] * (number + 1) + [1] * (steps - number - 1)),
                ):
                    config = tiny_config.with_settings(
                        grpo_sampling_steps=steps,
                        shift=shift,
                        guidance_interval=interval,
                        cfg_scale=2.0,
                    )
                    in_run = Guidance(2.0, interval=parse_interval(interval))
                    guided = [in_run.num_branches(time / 1000) for time in timesteps]
                    assert config.sampling.branches() == guided == expected, (
                        steps,
                        shift,
                        interval,
                    )
    assert num_bounds > 15


@pytest.mark.parametrize("steps, fraction, trained", [(16, 0.6, 10), (5, 0.5, 2), (3, 0.1, 1)])
def test_a_fraction_of_the_steps_is_rounded_to_the_nearest_and_halves_to_even(
    tiny_config, steps, fraction, trained
):
    """All steps of this schedule but the last are stochastic."""
    config = tiny_config.with_settings(grpo_sampling_steps=steps + 1, timestep_fraction=fraction)
    plan = make_plan(config)
    assert (plan.stochastic_steps, plan.num_trained_steps) == (steps, trained)
    anchored = make_plan(config.with_settings(timestep_fraction=1.0, anchor_fraction=fraction))
    assert (anchored.num_trained_steps, anchored.num_anchor_steps) == (steps, trained)
