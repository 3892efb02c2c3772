"""Settings that do nothing are named, and those that do something are not."""

import pytest

from hyvideo.idle_settings import idle_settings
from hyvideo.plan import make_plan


def told(config, world_size=1):
    return idle_settings(config, make_plan(config, world_size), world_size)


def mentions(sentences, words):
    return any(words in sentence for sentence in sentences)


@pytest.mark.parametrize(
    "idle, at_work, words",
    [
        ({}, {"num_updates_per_rollout": 2, "update_ref_model_step": 4}, "clip_range"),
        ({}, {"num_updates_per_rollout": 2, "update_ref_model_step": 4}, "the velocity KL (kl_velocity log_ratio)"),
        ({"kl_velocity": "gaussian"}, {"kl_strategy": "moving"}, "the velocity KL"),
        ({}, {"timestep_fraction": 0.5}, "enable_timestep_permutation"),
        ({"update_ref_model_step": 1}, {"update_ref_model_step": 3}, "the position KL"),
        ({"kl_weight": 1e-5, "kl_coef": 1e-7, "kl_min_coef": 1e-7}, {"kl_weight": 1.0, "kl_target": 0.1}, "kl_weight"),
        ({"kl_schedule": "constant", "kl_gain": 0.3}, {"kl_gain": 0.3}, "kl_gain"),
        ({"kl_weight": 0.0, "kl_schedule": "two_stage"}, {"kl_schedule": "two_stage"}, "kl_schedule"),
        ({"muon_momentum": 0.9}, {"muon_momentum": 0.9, "use_muon": True}, "muon_momentum"),
        ({"lora_alpha": 8.0}, {"lora_alpha": 8.0, "lora_rank": 4}, "lora_alpha"),
        (
            {"activation_checkpointing": "selective"},
            {"activation_checkpointing": "selective", "enable_gradient_checkpointing": True},
            "activation_checkpointing",
        ),
        ({"gate_interval": 0, "gate_tolerance": 1e-3}, {"gate_tolerance": 1e-3}, "gate_tolerance"),
        ({"batch_guidance": False}, {"batch_guidance": False, "cfg_scale": 2.0}, "batch_guidance"),
        ({"sde_window": "fixed:1:1"}, {}, "use_grad_balancing"),
    ],
)
def test_a_setting_is_named_only_where_it_does_nothing(tiny_config, idle, at_work, words):
    assert mentions(told(tiny_config.with_settings(**idle)), words)
    assert not mentions(told(tiny_config.with_settings(**at_work)), words)


def test_sharding_one_process_is_named(tiny_config):
    config = tiny_config.with_settings(enable_fsdp=True)
    assert mentions(told(config), "enable_fsdp: one process")
    assert not mentions(told(config, 2), "enable_fsdp")


def test_the_papers_own_constants_are_said_to_be_weak(tiny_config):
    weak = tiny_config.with_settings(kl_weight=1e-5, kl_coef=1e-7, kl_min_coef=1e-7, kl_target=None)
    (sentence,) = [one for one in told(weak) if one.startswith("kl_weight")]
    assert "at most 4e-08 of the force of an advantage of 1" in sentence
