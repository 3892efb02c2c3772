"""Values derived from the settings, and the settings of objectives."""

import pytest

from hyvideo.settings.command_line import load_config
from hyvideo.settings.config import LEAVES, Config
from hyvideo.settings.objectives import BUILT_IN


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
    assert without.objective.needs_anchor == (needs_anchor and not strategy.startswith("dual"))


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


@pytest.mark.parametrize("expert, expected", [("high", (3.0, 1.5)), ("low", (2.0, 3.0))])
def test_the_anchor_has_its_own_guidance_at_the_levels_of_the_trained_expert(
    tiny_config, expert, expected
):
    """At high and at low noise levels; the frozen expert keeps its scale."""
    config = tiny_config.with_settings(
        transformer_version="wan2.2_t2v_a14b",
        expert=expert,
        cfg_scale=2.0,
        low_noise_cfg_scale=1.5,
        anchor_cfg_scale=3.0,
        kl_strategy="fixed",
    )
    guidances = (config.anchor_guidance, config.sampling.guidance)
    found = [tuple(guidance.scale_at(level) for level in (0.95, 0.5)) for guidance in guidances]
    assert found == [expected, (2.0, 1.5)]


@pytest.mark.parametrize("objective", BUILT_IN)
def test_an_objective_has_only_its_own_settings(objective):
    pairs = {"pairs_csv": ["pairs.csv"]} if objective == "dpo" else {}
    config = Config.from_flat({"objective": objective, **pairs})
    own = type(config.objective).model_fields.keys()
    assert own <= config.flat().keys()
    others = {name for cls in BUILT_IN.values() for name in cls.model_fields} - own
    assert others and not config.flat().keys() & others
    with pytest.raises(ValueError, match=min(others)):
        config.with_settings(**{min(others): LEAVES[min(others)].default})
