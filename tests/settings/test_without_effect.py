"""Settings that have no effect are reported, and others are not."""

import pytest
import torch

from hyvideo.grpo.advantages import group_advantages
from hyvideo.grpo.trust_region import position_kl
from hyvideo.settings.config import LEAVES
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.settings.without_effect import _strength_of_kl, settings_without_effect
from hyvideo.validation.reward_hacking.rule import MIN_VIDEOS_TO_STOP


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
        ({"kl_velocity": "gaussian"}, {"kl_strategy": "moving"}, "the velocity KL"),
        ({"update_ref_model_step": 1}, {"update_ref_model_step": 3}, "the position KL"),
        (
            {"kl_weight": 1e-5, "kl_coef": 1e-7, "kl_min_coef": 1e-7},
            {"kl_weight": 1.0, "kl_target": 0.1},
            "kl_weight",
        ),
        (
            {"update_ref_model_step": 1},
            {"num_updates_per_rollout": 2, "update_ref_model_step": 2},
            "the position KL",
        ),
        # The remaining cases are on both sides of a bound; the run has 3 updates.
        (
            {"warmup_steps": 4},
            {"warmup_steps": 3},
            "learning_rate, warmup_steps: the run has 3 updates and warmup_steps 4, so the "
            "learning rate ends at 75%",
        ),
        (
            {"ema_decay": 0.8},
            {"ema_decay": 0.79},
            "ema_decay: after the 3 updates of the run, 51% of the EMA is still the base model",
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
    words = f"on_reward_hacking: a validation needs {MIN_VIDEOS_TO_STOP} videos to stop a run"
    assert mentions(report(config), words) == bool(lacking)
    assert not mentions(report(config.with_settings(validation_repeats=2)), words)


WEAK = {"kl_weight": 1e-5, "kl_coef": 1e-7, "kl_min_coef": 1e-7, "kl_target": None}


def sentence_of_kl_weight(config):
    return [sentence for sentence in report(config) if sentence.startswith("kl_weight")]


def test_the_kl_constants_of_the_paper_are_reported_as_weak(tiny_config):
    paper = tiny_config.with_settings(
        **WEAK, grpo_sampling_steps=20, shift=5.0, eta=0.5, last_step="stochastic"
    )
    (sentence,) = sentence_of_kl_weight(paper)
    # The equalizer weight of the last step is 0.06.
    assert "at most 8e-07 times that of an advantage of 1; it" in sentence
    assert sentence.endswith(
        "anchor costs 20 forward passes per rollout: kl_weight 0 saves all of them, "
        "anchor_fraction a part"
    )
    (sentence,) = sentence_of_kl_weight(
        paper.with_settings(dtype="bf16", cfg_scale=6.0, anchor_fraction=0.25)
    )
    assert (
        "of 1, which bf16 rounds away; it" in sentence
        and "anchor costs 10 forward passes per rollout" in sentence
    )
    (sentence,) = sentence_of_kl_weight(
        paper.with_settings(kl_strategy="stepwise", kl_velocity="gaussian")
    )
    assert "anchor costs" not in sentence
    (sentence,) = sentence_of_kl_weight(paper.with_settings(use_grad_balancing=False))
    assert "at most 4e-08 times that of an advantage of 1" in sentence


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


def test_no_advantage_exceeds_the_root_of_the_group_size_minus_one(tiny_config):
    """The largest advantage occurs if one rollout has reward 1 and all others 0."""
    for size in (2, 4, 9):
        rewards = torch.zeros(size).index_fill(0, torch.tensor([0]), 1.0)
        largest = group_advantages(rewards, size, clip=1e9).max().item()
        assert largest == pytest.approx((size - 1) ** 0.5, rel=1e-5)


def test_the_help_of_timestep_fraction_names_the_trained_steps():
    assert "without permutation, the noisiest" in LEAVES["timestep_fraction"].sentence
