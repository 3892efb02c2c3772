"""Training of a flow map: objective nft on its mean velocities, and students with drawn levels."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from hyvideo.checks.rules import check, check_sampling
from hyvideo.loss.flow_map import DIFFERENCE, derivative_term, differences
from hyvideo.models.guidance import Guidance
from hyvideo.trainer import Trainer
from hyvideo.training.iteration import sample
from hyvideo.training.rollout_batch import RolloutIndex, RolloutNoise
from tests.shallow import SHALLOW
from tests.test_trainer import CPU
from tests.training.test_nft_objective import sample_rollouts
from tests.training.test_run_state import train_iterations

FLOW_MAP = {"pretrained_model_root": SHALLOW, "transformer_version": "miniature_flow_map"}
NFT = {
    "objective": "nft",
    "nft_levels": 2,
    "eta": 0.0,
    "grpo_sampling_steps": 2,
    "num_updates_per_rollout": 1,
    "kl_strategy": "fixed",
    "learning_rate": 1e-3,
}
STUDENT = {
    "objective": "distill",
    "eta": 0.0,
    "cfg_scale": 1.0,
    "kl_strategy": "fixed",
    "grpo_sampling_steps": 3,
    "anchor_substeps": 2,
    "anchor_cfg_scale": 3.0,
}


@pytest.fixture
def config(tiny_config):
    return tiny_config.with_settings(**FLOW_MAP, **NFT)


@pytest.fixture
def trainer(config, mesh):
    return Trainer(config, mesh, CPU)


# --- objective nft --------------------------------------------------------------------------------


def test_the_gradient_equals_the_equation(config, mesh):
    """The loss is r |V - t|^2 + (1 - r) |2 V_old - V - t|^2 + 0.3 |V - V_anchor|^2 with V = u + (s
    - r) D, t = e - x0 and the same D, without gradient, in all three.
    """
    settings = {"anchor_cfg_scale": 3.0, "kl_weight": 0.3}
    config = config.with_settings(**settings, max_grad_norm=1e9, kl_schedule="constant")
    trainer = Trainer(config.with_settings(advantage_clip=2.0), mesh, CPU)
    rollouts, parameters = sample_rollouts(trainer), trainer.run.policy.parameters
    rollouts.advantages[:] = torch.tensor([1.5, -0.5, 1.0, -1.2, 0.3, -2.0, 0.2, 0.9])
    weights = [(1 + advantage / 2) / 2 for advantage in rollouts.advantages.tolist()]
    rows = list(range(8))
    losses = []
    lengths = []
    for column in rollouts.columns:
        starts = rollouts.trained_steps[:, column]
        ends = trainer.run.objective.interval_ends(rollouts, rows, column)
        noise = torch.stack([trainer.run.objective.noise_of(rollouts, row, column) for row in rows])
        final = rollouts.trajectories.latents[:, -1]
        s, r = (level.view(-1, 1, 1, 1, 1) for level in (starts, ends))
        latents, target = (1 - s) * final + s * noise, noise - final
        lengths += (starts - ends).tolist()

        def mean_velocity(latents, levels, pipeline=trainer.run.pipeline, ends=ends):
            return pipeline.velocity(latents, 1000 * levels, rollouts.conditions, ends=1000 * ends)

        with torch.no_grad():
            steps = differences(starts, ends)
            h = steps.view(-1, 1, 1, 1, 1)
            later = mean_velocity(latents + h * target, starts + steps)
            earlier = mean_velocity(latents - h * target, starts - steps)
            change = (s - r) * (later - earlier) / (2 * h)
            old = mean_velocity(latents, starts) + change
            guided = trainer.run.pipeline.with_guidance(Guidance(3.0))
            anchor = mean_velocity(latents, starts, guided) + change
        velocity = mean_velocity(latents, starts) + change
        for row in rows:
            good = (velocity - target)[row] ** 2
            bad = (2 * old - velocity - target)[row] ** 2
            kl = (velocity - anchor)[row] ** 2
            losses.append((weights[row] * good + (1 - weights[row]) * bad + 0.3 * kl).mean())
    assert min(lengths) == 0 and max(lengths) > 0.3
    gradients = torch.autograd.grad(torch.stack(losses).mean(), parameters)
    expected = torch.cat([gradient.flatten() for gradient in gradients])
    found = []

    def keep_gradient(rate):
        found.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))

    trainer.run.policy.optimizers.step = keep_gradient
    trainer.run.update(rollouts, trainer.run.objective.prepare(rollouts), 1)
    assert (found[0] - expected).norm() < 1e-3 * expected.norm()


def test_without_lengths_of_intervals_and_without_an_end_embedder_it_is_plain_nft(
    tiny_config, mesh, monkeypatch
):
    monkeypatch.setattr(RolloutNoise, "ends", lambda self, i, indices, c, levels, shift: levels)
    found = []
    for version in ("miniature", "miniature_flow_map"):
        settings = NFT | {
            "pretrained_model_root": "assets/miniature",
            "transformer_version": version,
            "random_weights": False,
        }
        trainer = Trainer(tiny_config.with_settings(**settings), mesh, CPU)
        monkeypatch.setattr(trainer.run.objective, "draw", fixed_levels)
        rollouts = sample_rollouts(trainer)
        metrics = trainer.run.update(rollouts, trainer.run.objective.prepare(rollouts), 1)
        del metrics["grad/norm"]  # includes the end embedder's
        found.append(metrics)
    assert found[0] == found[1] and found[0]["nft/error"] > 0


def fixed_levels(schedule, iteration, indices, count):
    return torch.linspace(0.1, 0.9, count).repeat(len(indices), 1)


def test_the_derivative_in_bf16_is_close_to_the_derivative_in_float32(tiny_config, mesh):
    settings = NFT | {
        "pretrained_model_root": "assets/miniature",
        "transformer_version": "miniature_flow_map",
        "random_weights": False,
    }
    config = tiny_config.with_settings(**settings)
    trainer = Trainer(config, mesh, CPU)
    exact = trainer.run.objective
    folder = f"{config.record.output_dir}_bf16"
    rounded = Trainer(config.with_settings(dtype="bf16", output_dir=folder), mesh, CPU)
    rollouts = sample_rollouts(trainer)
    rollouts = replace(rollouts, trained_steps=torch.linspace(0.3, 0.9, 8)[:, None])
    rows = list(range(8))
    noised, target = exact.noised_and_target(rollouts, rows, 0)
    found = [
        derivative_term(
            partial(objective._velocity, rollouts, rows, 0),
            noised,
            target,
            rollouts.trained_steps[:, 0],
            torch.zeros(8),
        )
        for objective in (exact, rounded.run.objective)
    ]
    with torch.no_grad():
        velocity = exact.velocity_at(rollouts, rows, 0, noised)
    assert 0 < (found[1] - found[0]).norm() < 0.25 * velocity.norm()


def test_only_intervals_with_a_length_leave_room_for_the_difference(config, mesh):
    objective = Trainer(config, mesh, CPU).run.objective
    indices = [RolloutIndex(0, member) for member in range(20)]
    levels = objective.draw(None, 1, indices, 200)
    ends = torch.stack(
        [
            objective.noise.ends(1, indices, column, levels[:, column], config.rollout.shift)
            for column in range(200)
        ],
        dim=1,
    )
    long = levels[ends < levels]
    assert long.min() >= DIFFERENCE and long.max() == pytest.approx(1 - DIFFERENCE)
    all_levels = objective.noise.levels(1, indices, 200, config.rollout.shift)
    has_no_length = ends == levels
    assert torch.equal(levels[has_no_length], all_levels[has_no_length])
    assert levels.max() > 0.995  # a student's first step is at 1
    steps = differences(levels.flatten(), ends.flatten())
    assert steps.min() > 0
    assert (levels.flatten() + steps).max() <= 1 and (levels.flatten() - steps).min() >= 0


def test_the_timesteps_of_all_passes_are_prepared_for_a_cache(trainer, monkeypatch):
    prepared, used = set(), set()
    pipeline = trainer.run.pipeline
    forward = pipeline._forward
    monkeypatch.setattr(pipeline, "prepare", prepared.update)
    rollouts = sample_rollouts(trainer)
    monkeypatch.setattr(
        pipeline, "_forward", lambda x, times, *rest: used.update(times) or forward(x, times, *rest)
    )
    prepared.clear()
    reference = trainer.run.objective.prepare(rollouts)
    for column in rollouts.columns:
        rows = list(range(len(rollouts)))
        trainer.run.objective.terms(rollouts, reference, rows, column, kl_coefficient=0.0)
    assert len(used) == 8 * 2 * 3 and used == prepared


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"eta": 0.5}, "sde_type adds noise by sage_grpo.*anchored"),
        ({"reward_gradient_weight": 0.1}, "reward_gradient_weight needs a model of velocities"),
        (
            {"transformer_version": "480p_t2v_step_distilled"},
            "step-distilled and only covers the levels of its few steps",
        ),
    ],
)
def test_what_a_flow_map_cannot_be_trained_with_is_rejected_before_it_is_loaded(
    config, settings, message
):
    check(config)
    check(config.with_settings(eta=0.5, sde_type="anchored"))
    with pytest.raises(ValueError, match=message):
        check(config.with_settings(**settings))


def test_generate_refuses_the_noise_that_training_refuses(config, tmp_path):
    sampling = config.sampling

    def sample(sampler, eta):
        chosen = replace(sampling, sampler=sampler, eta=eta)
        check_sampling(chosen, root=SHALLOW, version="miniature_flow_map", output=tmp_path)

    sample("anchored", 0.5)
    sample("cps", 0.0)
    with pytest.raises(ValueError, match="cps.*anchored"):
        sample("cps", 0.5)


# --- students -------------------------------------------------------------------------------------


def schedules(trainer):
    collector = trainer.run.source
    return [collector.schedule_of(iteration).sigmas for iteration in (1, 2)]


def test_a_student_that_is_a_flow_map_learns_drawn_steps(tiny_config, mesh):
    config = tiny_config.with_settings(**FLOW_MAP, **STUDENT)
    trainer = Trainer(config, mesh, CPU)
    first, second = schedules(trainer)
    assert first != second and len(first) == 4 and first[0] == 1 and first[-1] == 0
    assert list(first) == sorted(first, reverse=True)
    rollouts, _ = sample(trainer.run, 1)
    teacher = trainer.run.objective.teacher_schedule(rollouts).sigmas
    assert teacher[::2] == pytest.approx(first) and len(teacher) == 7
    (line,) = train_iterations(trainer, 1)  # with the check that teacher and student are equal
    assert float(line["loss/total"]) > 0


def test_other_students_and_given_levels_keep_their_steps(tiny_config, mesh):
    config = tiny_config.with_settings(**FLOW_MAP | STUDENT | {"sigmas": "1,0.8,0.5"})
    first, second = schedules(Trainer(config, mesh, CPU))
    assert first == second
