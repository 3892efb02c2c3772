"""Settings that do nothing are named, and those that do something are not."""

import pytest
import torch

from hyvideo.config.run_plan import make_plan
from hyvideo.config.without_effect import _strength_of_kl, settings_without_effect
from hyvideo.grpo.trust_region import position_kl
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler


def told(config, world_size=1):
    return settings_without_effect(config, make_plan(config, world_size), world_size)


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
        ({"update_ref_model_step": 1}, {"num_updates_per_rollout": 2, "update_ref_model_step": 2}, "the position KL"),
        ({"kl_strategy": "moving", "kl_velocity": "gaussian"}, {"kl_velocity": "gaussian"}, "kl_velocity: "),
        ({"kl_strategy": "fixed", "use_dual_kl": False}, {"use_dual_kl": False}, "use_dual_kl: kl_strategy fixed"),
        ({"kl_schedule": "two_stage", "kl_min_coef": 1e-6}, {"kl_min_coef": 1e-6}, "kl_min_coef: "),
        (
            {"remote_reward_url": "http://a", "reward_precision": "fp32_math"},
            {"reward_model": ["videoalign"], "reward_precision": "fp32_math"},
            "reward_precision: remote_reward_url",
        ),
        ({"hacking_threshold": 2.0}, {"hacking_threshold": 2.0, "valid_video_csv": "some.csv"}, "hacking_threshold"),
        ({"keep_every": 10, "save_total_limit": 0}, {"keep_every": 10}, "keep_every"),
    ],
)
def test_a_setting_is_named_only_where_it_does_nothing(tiny_config, idle, at_work, words):
    assert mentions(told(tiny_config.with_settings(**idle)), words)
    assert not mentions(told(tiny_config.with_settings(**at_work)), words)


def test_sharding_one_process_is_named(tiny_config):
    config = tiny_config.with_settings(enable_fsdp=True)
    assert mentions(told(config), "enable_fsdp: one process")
    assert not mentions(told(config, 2), "enable_fsdp")


WEAK = {"kl_weight": 1e-5, "kl_coef": 1e-7, "kl_min_coef": 1e-7, "kl_target": None}


def sentence_of_kl_weight(config):
    return [one for one in told(config) if one.startswith("kl_weight")]


def test_the_papers_own_constants_are_said_to_be_weak(tiny_config):
    paper = tiny_config.with_settings(**WEAK, grpo_sampling_steps=20, shift=5.0, eta=0.5, last_step="stochastic")
    (sentence,) = sentence_of_kl_weight(paper)
    # The equalizer weighs the last step's advantages by 0.06.
    assert "at most 7e-07 of the force of an advantage of 1" in sentence
    (sentence,) = sentence_of_kl_weight(paper.with_settings(use_grad_balancing=False))
    assert "at most 4e-08 of the force of an advantage of 1" in sentence


def test_the_weight_of_the_distance_counts(tiny_config):
    assert sentence_of_kl_weight(tiny_config.with_settings(**WEAK))
    assert not sentence_of_kl_weight(tiny_config.with_settings(**WEAK, dual_kl_moving_weight=1e5))
    # The gradient of a log-ratio does not fall with the distance.
    assert not sentence_of_kl_weight(tiny_config.with_settings(**WEAK, kl_strategy="stepwise"))


@pytest.mark.parametrize("sde_type", ["sage_grpo", "cps"])
def test_the_pull_is_that_of_the_gradients(tiny_config, sde_type):
    config = tiny_config.with_settings(kl_strategy="fixed", sde_type=sde_type, kl_weight=0.3)
    rollout, distance = config.rollout, 0.02
    scheduler = FlowMatchDiscreteScheduler(rollout.shift, rollout.last_step)
    scheduler.set_timesteps(rollout.grpo_sampling_steps)
    sampler = {"eta": rollout.eta, "sde_type": sde_type}
    weights = scheduler.compute_grad_balancing_factors(**sampler)
    x, velocity = torch.randn(2, 1, 200, 200)
    forces = []
    for place in scheduler.stochastic_steps(**sampler):
        taken = scheduler.sde_step_with_logprob(velocity, x, scheduler.timesteps[place], **sampler)
        v = velocity.clone().requires_grad_()
        step = scheduler.sde_step_with_logprob(
            v, x, scheduler.timesteps[place], prev_sample=taken.prev_sample, **sampler
        )
        anchor = taken.prev_sample_mean + taken.std_dev_t * (2 * distance) ** 0.5
        kl = 0.3 * position_kl(step.prev_sample_mean, anchor, step.std_dev_t).sum()
        pulls = [torch.autograd.grad(f, v, retain_graph=True)[0].norm() for f in (kl, weights[place] * step.log_prob)]
        forces.append((pulls[0] / pulls[1]).item())
    assert max(forces) == pytest.approx(_strength_of_kl(config) * (2 * distance) ** 0.5, rel=0.02)
