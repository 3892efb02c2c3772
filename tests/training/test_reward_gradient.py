"""Reward gradients: the chain from a reward to the weights, beside other terms, on ranks and after
a resume.
"""

import math
from dataclasses import replace

import pytest
import torch

from hyvideo.checks.rules import check
from hyvideo.data.videos import to_levels
from hyvideo.models import decoding
from hyvideo.models.guidance import Guidance
from hyvideo.rewards.rewards import Scorer
from hyvideo.trainer import Trainer
from hyvideo.training.iteration import sample
from hyvideo.training.on_policy_check import OffPolicyError
from tests.shallow import SHALLOW

CPU = torch.device("cpu")
DRAFT = {
    "pretrained_model_root": SHALLOW,
    "objective": "draft",
    "reward_gradient_weight": 0.7,
    "nft_levels": 2,
    "eta": 0.0,
    "kl_strategy": "fixed",
    "kl_schedule": "constant",
    "kl_weight": 0.3,
    "kl_warmup_updates": 0,
    "anchor_cfg_scale": 2.0,
    "learning_rate": 1e-3,
    "max_grad_norm": 1e9,
}
ALONE = DRAFT | {
    "kl_strategy": "none",
    "kl_weight": 0.0,
    "nft_levels": 0,
}
ALONE |= {"anchor_cfg_scale": None}


def contrast(videos):
    """Return two smooth scores: the mean square of a saturating color difference, and of the
    motion.
    """
    color = torch.tanh((videos[:, :, 0] - videos[:, :, 2]) / 100).square().mean((1, 2, 3))
    motion = (videos.diff(dim=1) / 100).square().mean((1, 2, 3, 4))
    return torch.stack([color, motion], dim=1)


class Contrast(Scorer):
    dimensions = ("VQ", "MQ")

    def score(self, videos, prompts, *, fps):
        return [
            dict(zip(self.dimensions, row))
            for row in contrast(torch.stack(videos).float()).tolist()
        ]

    def score_with_gradient(self, videos, prompts, *, fps):
        return contrast(videos)


class SometimesMissing(Contrast):
    """Scorer whose scores with gradient are NaN for the less colorful half of the videos."""

    def score_with_gradient(self, videos, prompts, *, fps):
        values = contrast(videos)
        return torch.where((values[:, 0] < values[:, 0].median())[:, None], math.nan, values)


WEIGHTS = '{"VQ": 0.5, "MQ": 2}'


def make_trainer(config, mesh, scorer=None, **changes):
    config = config.with_settings(**{"reward_weights": WEIGHTS} | changes)
    check(config)
    return Trainer(config, mesh, CPU, scorers={"test": scorer or Contrast()})


def sampled(trainer):
    trainer.iteration = 1
    rollouts, pending = sample(trainer.run, 1)
    rewards = trainer.run.rewards.wait(pending)
    return rollouts.with_rewards(
        rewards, trainer.run.rewards.advantages(rollouts.indices, rewards)[0]
    )


def gradients_of(trainer, rollouts, columns=None, rows=None):
    """Return the gradients of the weights by the mean loss over rows and columns, as an update
    computes them.
    """
    reference = trainer.run.objective.prepare(rollouts)
    rows = list(range(len(rollouts))) if rows is None else rows
    loss = 0.0
    term = trainer.run.update.reward_term or trainer.run.objective
    for column in rollouts.all_columns if columns is None else columns:
        terms = term.terms(rollouts, reference, rows, column, kl_coefficient=0.3)
        loss = loss + terms.loss.sum() / (len(rows) * len(rollouts.all_columns))
    found = torch.autograd.grad(loss, trainer.run.policy.parameters)
    return torch.cat([each.flatten() for each in found])


def last_step(trainer, rollouts):
    """Return the latents before the last step, the velocity there with gradient, and its noise
    level.
    """
    sigma = rollouts.schedule.sigmas[-2]
    latents = rollouts.trajectories.latents[:, -2]
    times = torch.full((len(rollouts),), 1000 * sigma)
    return latents, trainer.run.pipeline.velocity(latents, times, rollouts.conditions), sigma


# --- the chain ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"cfg_scale": 2.0, "decode_batch_size": 3}], ids=["plain", "guided"]
)
def test_the_gradient_is_that_of_an_unsplit_graph(tiny_config, mesh, settings):
    trainer = make_trainer(tiny_config, mesh, **ALONE | settings)
    rollouts = sampled(trainer)
    found = gradients_of(trainer, rollouts)
    latents, velocity, sigma = last_step(trainer, rollouts)
    denoised = latents - sigma * velocity
    torch.testing.assert_close(denoised, rollouts.trajectories.final, rtol=0, atol=1e-5)
    decoded = trainer.run.pipeline.vae.decode(
        trainer.run.pipeline.latents.unscaled(denoised), return_dict=False
    )[0]
    scores = Contrast().score_with_gradient(
        to_levels(decoded.transpose(1, 2)), rollouts.prompts, fps=8
    )
    loss = -0.7 * (scores @ torch.tensor([0.5, 2.0])).mean()
    expected = torch.cat(
        [each.flatten() for each in torch.autograd.grad(loss, trainer.run.policy.parameters)]
    )
    assert expected.norm() > 0
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_rewards_with_gradient_are_those_of_the_rollouts(tiny_config, mesh):
    trainer = make_trainer(tiny_config, mesh, **DRAFT)
    metrics = trainer.run_iteration()
    assert metrics["reward_gradient/reward"] == pytest.approx(metrics["reward/mean"], abs=1e-5)
    assert metrics["reward_gradient/norm"] > 0 and metrics["reward_gradient/missing"] == 0
    assert metrics["kl/position"] > 0 and metrics["policy/velocity_norm"] > 0


def test_each_row_of_a_pass_is_judged_by_its_own_prompt(tiny_config, mesh):
    """Also in passes over rows that are not the first, of several prompts."""

    def weights_of(prompts):
        return torch.tensor([1 + sum(prompt.encode()) % 7 for prompt in prompts])[:, None]

    class OfPrompt(Contrast):
        def score(self, videos, prompts, *, fps):
            values = contrast(torch.stack(videos).float()) * weights_of(prompts)
            return [dict(zip(self.dimensions, row)) for row in values.tolist()]

        def score_with_gradient(self, videos, prompts, *, fps):
            return contrast(videos) * weights_of(prompts)

    settings = ALONE | {"mini_batch_size_per_update": 3, "num_generations": 2}
    trainer = make_trainer(tiny_config, mesh, OfPrompt(), **settings)
    rollouts = sampled(trainer)
    assert len(set(weights_of(rollouts.prompts).flatten().tolist())) > 2
    trainer.iteration = 2
    metrics = trainer.run_iteration()  # compares the rewards of each pass with the rollouts'
    assert metrics["reward_gradient/reward"] == pytest.approx(metrics["reward/mean"], rel=1e-4)


def test_other_values_with_gradient_end_the_run(tiny_config, mesh):
    class Differs(Contrast):
        def score_with_gradient(self, videos, prompts, *, fps):
            return 1.1 * super().score_with_gradient(videos, prompts, fps=fps) + 0.1

    trainer = make_trainer(tiny_config, mesh, Differs(), **DRAFT)
    with pytest.raises(
        OffPolicyError,
        match="difference between the reward with gradient and the reward of the rollout",
    ):
        trainer.run_iteration()


def test_a_reward_without_a_finite_gradient_ends_the_run(tiny_config, mesh):
    class NotFinite(Contrast):
        def score_with_gradient(self, videos, prompts, *, fps):
            scores = super().score_with_gradient(videos, prompts, fps=fps)
            return scores + (scores - scores.detach()).abs().sqrt()  # 0, of infinite slope

    trainer = make_trainer(tiny_config, mesh, NotFinite(), **DRAFT)
    with pytest.raises(OffPolicyError, match="no finite value with gradient is 1, above 0.5"):
        trainer.run_iteration()


def test_a_detached_score_is_an_error_at_the_start(tiny_config, mesh):
    class Detached(Contrast):
        def score_with_gradient(self, videos, prompts, *, fps):
            return super().score_with_gradient(videos, prompts, fps=fps).detach()

    with pytest.raises(ValueError, match="score_with_gradient of Detached must have a gradient"):
        make_trainer(tiny_config, mesh, Detached(), **DRAFT)


def test_a_missing_reward_contributes_nothing(tiny_config, mesh):
    """The loss of the others is divided by the number of all rollouts."""
    trainer = make_trainer(tiny_config, mesh, SometimesMissing(), **ALONE | {"gate_interval": 0})
    rollouts = sampled(trainer)
    reference = trainer.run.objective.prepare(rollouts)
    terms = trainer.run.update.reward_term.terms(
        rollouts, reference, list(range(8)), 0, kl_coefficient=0.0
    )
    is_missing = terms.metrics["reward_gradient/missing"] == 1
    assert (
        0 < is_missing.sum() < 8
        and terms.loss[is_missing].eq(0).all()
        and terms.loss.isfinite().all()
    )
    found = torch.autograd.grad(terms.loss.sum(), trainer.run.policy.parameters)
    trainer.run.update.reward_term.gradient.scorer.scorers["test"] = Contrast()
    rows = [row for row in range(8) if not is_missing[row]]
    terms = trainer.run.update.reward_term.terms(rollouts, reference, rows, 0, kl_coefficient=0.0)
    expected = torch.autograd.grad(terms.loss.sum(), trainer.run.policy.parameters)
    difference = sum((a - b).square().sum() for a, b in zip(found, expected)).sqrt()
    assert difference < 1e-5 * sum(b.square().sum() for b in expected).sqrt()


# --- beside other terms ---------------------------------------------------------------------------


def test_the_gradient_is_the_sum_of_the_objective_and_of_the_reward(tiny_config, mesh):
    settings = DRAFT | {"objective": "nft"}
    trainer = make_trainer(tiny_config, mesh, **settings)
    rollouts = sampled(trainer)
    assert rollouts.trained_steps.shape == (8, 3)
    both = gradients_of(trainer, rollouts)
    reward = gradients_of(trainer, rollouts, columns=[2])
    alone = make_trainer(tiny_config, mesh, **settings)
    alone.run.update.reward_term = None
    without = replace(
        rollouts, trained_steps=rollouts.trained_steps[:, :2], has_reward_column=False
    )
    expected = gradients_of(alone, without) + reward
    assert (both - expected).norm() < 1e-5 * expected.norm()
    assert reward.norm() > 0 and (both - reward).norm() > 0


def test_without_noise_levels_the_kl_shares_the_pass_of_the_reward(tiny_config, mesh):
    changes = {"nft_levels": 0, "grpo_sampling_steps": 8}
    trainer = make_trainer(tiny_config, mesh, **DRAFT | changes)
    rollouts = sampled(trainer)
    reference = trainer.run.objective.prepare(rollouts)
    terms = trainer.run.update.reward_term.terms(
        rollouts, reference, list(range(8)), 0, kl_coefficient=0.3
    )
    latents = rollouts.trajectories.latents[:, 7]
    times = torch.full((8,), 1000 * rollouts.schedule.sigmas[7])
    with torch.no_grad():
        velocity = trainer.run.pipeline.velocity(latents, times, rollouts.conditions)
        anchor = trainer.run.pipeline.with_guidance(Guidance(2.0)).velocity(
            latents, times, rollouts.conditions
        )
    expected = (velocity - anchor).square().flatten(1).mean(1)
    torch.testing.assert_close(terms.kl, expected, rtol=1e-4, atol=1e-7)
    metrics = trainer.run.update(rollouts, reference, 1)
    assert metrics["kl/position"] == pytest.approx(expected.mean().item(), rel=1e-4)


def test_a_control_run_makes_the_same_forward_passes_without_the_reward(tiny_config, mesh):
    class Fails(Contrast):
        def score_with_gradient(self, videos, prompts, *, fps):
            raise AssertionError("a control run must not use the gradient")

    found = {}
    for is_control in (False, True):
        scorer = Fails() if is_control else Contrast()
        trainer = make_trainer(tiny_config, mesh, scorer, **DRAFT | {"ignore_rewards": is_control})
        trainer.iteration = 1
        found[is_control] = trainer.run_iteration()
    assert found[True]["cost/forwards"] == found[False]["cost/forwards"]
    assert found[True]["reward_gradient/norm"] == 0 and found[True]["grad/norm"] > 0
    assert found[True]["grad/norm"] != found[False]["grad/norm"]


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"objective": "nft", "nft_levels": 0},
            "nft_levels: Input should be greater than or equal to 1",
        ),
    ],
)
def test_settings_without_a_gradient_are_refused_with_what_to_use(tiny_config, changes, message):
    check(tiny_config.with_settings(**DRAFT))
    with pytest.raises(ValueError, match=message):
        check(tiny_config.with_settings(**DRAFT | changes))


@pytest.mark.parametrize("objective, levels", [("draft", 2), ("draft", 0)])
def test_the_velocity_norm_is_relative_to_the_anchor(tiny_config, mesh, objective, levels):
    """Anchor and policy differ only in guidance; half of the columns with noise levels measure the
    KL.
    """
    changes = {"objective": objective, "nft_levels": levels, "anchor_fraction": 0.5}
    trainer = make_trainer(tiny_config, mesh, **DRAFT | changes)
    rollouts = sampled(trainer)
    reference = trainer.run.objective.prepare(rollouts)
    metrics = trainer.run.update(rollouts, reference, 1)
    [(column, anchor)] = reference.items()
    own = make_trainer(tiny_config, mesh, **DRAFT | changes).run.objective.predict(
        rollouts, list(range(8)), column
    )
    expected = (
        (own.square().flatten(1).mean(1) / anchor.square().flatten(1).mean(1)).sqrt().mean().item()
    )
    assert (
        metrics["policy/velocity_norm"] == pytest.approx(expected, rel=1e-4)
        and abs(expected - 1) > 1e-3
    )


# --- memory of a GPU ------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_gradient_without_memory_is_computed_again_in_smaller_tiles(
    tiny_config, mesh, monkeypatch, capsys, part
):
    """The decoder lacks memory for whole frames with a gradient; without one they fit."""
    trainer = make_trainer(tiny_config, mesh, **ALONE)
    pipeline = trainer.run.pipeline
    forward = pipeline.vae.decoder.forward

    def raise_for_whole_frames(tensor):
        if tensor.shape[-2:] == noise.shape[-2:]:
            raise torch.OutOfMemoryError("whole frames")

    def decoder(hidden):
        if hidden.requires_grad and part == "forward":
            raise_for_whole_frames(hidden)
        elif hidden.requires_grad:
            hidden.register_hook(raise_for_whole_frames)
        return forward(hidden)

    monkeypatch.setattr(pipeline.vae.decoder, "forward", decoder)
    monkeypatch.setattr(decoding, "_SMALLER_TILES", (16,))
    noise = pipeline.noise_of_tile(5, 32, 48, batch_size=1)
    found = trainer.run.update.reward_term.gradient(noise, ["a prompt"])
    assert decoding.tile_size_of(pipeline.vae) == 16
    assert "tiles of 16 pixels" in capsys.readouterr().err
    assert found.gradients.isfinite().all() and found.gradients.norm() > 0


def test_cudnn_measures_its_kernels_in_the_gradient_of_the_decoding_too(
    tiny_config, mesh, monkeypatch
):
    trainer = make_trainer(tiny_config, mesh, **ALONE)
    measured = []

    def note(*_):
        measured.append(torch.backends.cudnn.benchmark)

    def decoder(hidden):
        hidden.register_hook(note)
        note()
        return forward(hidden)

    vae = trainer.run.pipeline.vae
    forward = vae.decoder.forward
    monkeypatch.setattr(vae.decoder, "forward", decoder)
    noise = trainer.run.pipeline.noise_of_tile(5, 32, 48, batch_size=1)
    trainer.run.update.reward_term.gradient(noise, ["a prompt"])
    assert measured == [True, True] and not torch.backends.cudnn.benchmark
