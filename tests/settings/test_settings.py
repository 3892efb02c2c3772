"""Settings, their traits, and the values derived from them."""

import pytest

from hyvideo.settings.command_line import load_config
from hyvideo.settings.config import LEAVES, SECTIONS, Config, value_type
from hyvideo.settings.sections import Traits


def test_every_setting_has_a_help_text_and_a_category():
    assert list(LEAVES) == list(LEAVES) == list(Config().flat())
    for name, traits in LEAVES.items():
        assert traits.sentence.endswith("."), name
        assert traits.decides in ("learning", "layout", "machine", "records", "start"), name
    for section in SECTIONS.values():
        assert section.__doc__.endswith(".") and "(" not in section.__doc__


def test_every_default_is_within_its_range():
    assert not [
        name for name, value in Config().flat().items() if LEAVES[name].range_problem(value)
    ]


def test_every_number_has_a_range():
    """Except for settings that may be negative."""
    unbounded = {
        name
        for name in LEAVES
        if value_type(name) in (int, float)
        and LEAVES[name].at_least is None
        and LEAVES[name].above is None
    }
    # 1 or less runs one branch
    assert unbounded == {"cfg_scale", "anchor_cfg_scale", "validation_cfg_scale"}


def test_a_value_at_an_inclusive_bound_is_allowed_and_its_neighbor_is_not():
    for name, traits in LEAVES.items():
        unit = 1 if value_type(name) is int else 1e-9
        if value_type(name) not in (int, float):
            continue
        for bound, sign, is_allowed in (
            (traits.at_least, -1, True),
            (traits.at_most, 1, True),
            (traits.above, -1, False),
            (traits.below, 1, False),
        ):
            if bound is not None and not (sign < 0 and traits.above is not None and is_allowed):
                step = sign * unit * (1 if unit == 1 else max(1.0, abs(bound)))
                assert (traits.range_problem(bound) is None) is is_allowed, (name, bound)
                assert traits.range_problem(bound + step) is not None, (name, bound)
                assert traits.range_problem(bound - step) is None, (name, bound)


@pytest.mark.parametrize(
    "bounds, bad, good, message",
    [
        ({"at_least": 0}, -1, 0, "must not be negative"),
        ({"at_least": 1}, 0, 1, "must be at least 1"),
        ({"above": 0}, 0, 1e-9, "must be positive"),
        ({"at_most": 1}, 1.5, 1.0, "must be at most 1"),
        ({"below": 1}, 1, 0.999, "must be below 1"),
        ({}, 1e31, 1e30, "must be at most 1e+30"),
        ({}, float("nan"), None, "must be a finite number"),
        ({}, float("inf"), True, "must be a finite number"),
    ],
)
def test_a_number_is_within_its_bounds(bounds, bad, good, message):
    traits = Traits("A number.", "learning", **bounds)
    assert traits.range_problem(bad) == message
    assert traits.range_problem(good) is None


@pytest.mark.parametrize(
    "flags, strategy",
    [
        ({}, "dual_moving"),
        ({"kl_weight": 0.0}, "none"),
        ({"kl_weight": 0.0, "kl_strategy": "fixed"}, "none"),
        ({"kl_strategy": "stepwise"}, "stepwise"),
    ],
)
def test_a_weight_of_0_disables_the_kl_terms(flags, strategy):
    config = load_config("configs/smoke.yaml", **flags)
    assert config.objective.strategy == config.flat()["kl_strategy"] == strategy


@pytest.mark.parametrize(
    "strategy, weights, needs_anchor",
    [
        ("none", (0, 0), False),
        ("fixed", (1, 0), True),
        ("stepwise", (0, 1), False),
        ("moving", (1, 0), True),
        ("dual_moving", (0.3, 0.7), True),
        ("dual_fixed", (0.3, 0.7), True),
    ],
)
def test_a_strategy_weights_the_two_kl_terms(tiny_config, strategy, weights, needs_anchor):
    changes = {"kl_strategy": strategy, "dual_kl_moving_weight": 0.3, "dual_kl_step_weight": 0.7}
    config = tiny_config.with_settings(**changes)
    assert config.objective.kl_weights == weights and config.objective.needs_anchor == needs_anchor
    without = config.with_settings(dual_kl_moving_weight=0.0)
    assert without.needs_anchor == (needs_anchor and not strategy.startswith("dual"))


def test_guidance_determines_the_number_of_branches(tiny_config):
    assert tiny_config.num_branches == 1
    assert tiny_config.with_settings(cfg_scale=2.0).num_branches == 2
    guided = tiny_config.with_settings(anchor_cfg_scale=3.0)
    assert (
        guided.num_branches == 1
        and len(guided.negative_requests) == 1
        and not tiny_config.negative_requests
    )
    assert not guided.with_settings(kl_weight=0.0).negative_requests  # no anchor
