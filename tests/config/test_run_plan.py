"""The arithmetic of a run."""

from hyvideo.config.run_plan import describe, make_plan, num_stochastic_steps


def test_the_arithmetic_of_the_large_setting(tiny_config):
    config = tiny_config.with_settings(batch_size=2, num_generations=4, sp_size=2)
    plan = make_plan(config, world_size=64)
    assert (plan.replicas, plan.rollouts, plan.groups) == (32, 64, 16)


def test_it_is_said_whether_the_clip_can_bind(tiny_config):
    assert not make_plan(tiny_config).clip_can_bind
    twice = tiny_config.with_settings(num_updates_per_rollout=2)
    assert make_plan(twice).clip_can_bind
    assert "active after the first update" in describe(twice, make_plan(twice))


def test_steps_that_sage_cannot_make_stochastic_are_not_counted(tiny_config):
    config = tiny_config.with_settings(grpo_sampling_steps=100, shift=5.0, last_step="stochastic")
    assert num_stochastic_steps(config.rollout) == 99


def test_what_cps_leaves_of_the_velocity_distance_is_said_where_it_counts(tiny_config):
    several = {"num_updates_per_rollout": 2, "grpo_sampling_steps": 20, "shift": 5.0, "eta": 0.5}

    def said(**changes):
        config = tiny_config.with_settings(**several | changes)
        return "the log_ratio of cps is 2 std^2 times the KL, 0.98 at the first and 0.043 at the last" in describe(
            config, make_plan(config)
        )

    assert said(sde_type="cps") and said(sde_type="cps", kl_strategy="stepwise")
    assert not said() and not said(sde_type="cps", kl_velocity="gaussian")
    assert not said(sde_type="cps", kl_strategy="moving") and not said(sde_type="cps", num_updates_per_rollout=1)
