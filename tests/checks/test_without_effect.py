"""Settings that have no effect are reported, and others are not."""

import pytest
import torch

from hyvideo.checks.without_effect import (
    MIN_VIDEOS_TO_STOP,
    _strength_of_kl,
    settings_without_effect,
)
from hyvideo.loss.trust_region import position_kl
from hyvideo.settings.run_inputs import RunInputs


def report(config, world_size=1):
    return settings_without_effect(RunInputs(config, world_size))


def mentions(sentences, words):
    return any(words in sentence for sentence in sentences)


@pytest.mark.parametrize(
    "idle, effective, words",
    [
        (
            {},
            {"num_updates_per_rollout": 2, "update_ref_model_step": 4},
            "the velocity KL (kl_velocity log_ratio)",
        ),
        ({"update_ref_model_step": 1}, {"update_ref_model_step": 3}, "the position KL"),
        (
            {"kl_weight": 1e-5, "kl_coef": 1e-7},
            {"kl_weight": 1.0, "kl_target": 0.1},
            "kl_weight",
        ),
        # The remaining cases are on both sides of a bound; the run has 3 updates.
        (
            {"warmup_steps": 4},
            {"warmup_steps": 3},
            "warmup_steps",
        ),
        (
            {"ema_decay": 0.8},
            {"ema_decay": 0.79},
            "ema_decay",
        ),
    ],
)
def test_a_setting_is_reported_only_if_it_has_no_effect(tiny_config, idle, effective, words):
    assert mentions(report(tiny_config.with_settings(**idle)), words)
    assert not mentions(report(tiny_config.with_settings(**effective)), words)


@pytest.mark.parametrize("lacking", [0, 1])
def test_on_reward_hacking_stop_has_no_effect_with_too_few_videos(tiny_config, tmp_path, lacking):
    path = tmp_path / "prompts.csv"
    path.write_text("prompt\n" + "a\n" * (MIN_VIDEOS_TO_STOP - lacking))
    config = tiny_config.with_settings(on_reward_hacking="stop", valid_video_csv=str(path))
    words = "on_reward_hacking"
    assert mentions(report(config), words) == bool(lacking)
    assert not mentions(report(config.with_settings(validation_repeats=2)), words)


WEAK = {"kl_weight": 1e-5, "kl_coef": 1e-7, "kl_target": None}


def sentence_of_kl_weight(config):
    return [sentence for sentence in report(config) if sentence.startswith("kl_weight")]


def test_the_weights_of_the_kl_terms_count(tiny_config):
    assert sentence_of_kl_weight(tiny_config.with_settings(**WEAK))
    assert not sentence_of_kl_weight(tiny_config.with_settings(**WEAK, dual_kl_moving_weight=1e5))
    # The gradient of a log-ratio does not vanish with the KL.
    assert not sentence_of_kl_weight(tiny_config.with_settings(**WEAK, kl_strategy="stepwise"))


@pytest.mark.parametrize("sde_type", ["sage_grpo", "cps"])
def test_the_predicted_strength_of_the_kl_equals_that_of_the_gradients(tiny_config, sde_type):
    config = tiny_config.with_settings(kl_strategy="fixed", sde_type=sde_type, kl_weight=0.3)
    distance = 0.02
    schedule = config.sampling.schedule()
    x, velocity = torch.randn(2, 1, 200, 200)
    forces = []
    for index in schedule.stochastic_steps:
        taken = schedule.step(velocity, x, index, torch.randn_like(x))
        v = velocity.clone().requires_grad_()
        step = schedule.replay(v, x, [index], taken.sample)
        anchor = taken.mean + taken.std * (2 * distance) ** 0.5
        kl = 0.3 * position_kl(step.mean, anchor, step.std).sum()
        policy = schedule.equalizer_weights[index] * step.log_prob
        pulls = [torch.autograd.grad(term, v, retain_graph=True)[0].norm() for term in (kl, policy)]
        forces.append((pulls[0] / pulls[1]).item())
    strength = _strength_of_kl(config.sampling, config.objective)
    assert max(forces) == pytest.approx(strength * (2 * distance) ** 0.5, rel=0.02)
