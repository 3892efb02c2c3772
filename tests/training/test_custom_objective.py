"""Setting ``objective FILE.py:NAME``: checked before a run, trained with, compared on resume."""

import math

import pytest
import torch

from hyvideo.settings.identity import code_of
from hyvideo.settings.rules import check
from hyvideo.trainer import Trainer
from tests.forked import ROOT
from tests.shallow import SHALLOW
from tests.test_trainer import Redness, weights

CPU = torch.device("cpu")
EXAMPLE = f"{ROOT}/examples/custom_objective.py:WeightedRegression"
LEVELS = {"nft_levels": 2, "eta": 0.0, "learning_rate": 1e-3}
TEXT = """
from typing import ClassVar
import torch
from hyvideo.grpo.nft import mean_square
from hyvideo.settings.sections import Section
from hyvideo.training.objective import LevelObjective, StepObjective, Terms

def on_rows(loss, **others):
    parts = {"kl": torch.zeros_like(loss), "deviation": torch.zeros_like(loss), "metrics": {"loss/total": loss}}
    return Terms(loss=loss, **parts | others)

class Mine(LevelObjective):
    metrics = ("loss/total",)
    def terms(self, rollouts, reference, rows, column, *, kl_coefficient):
        velocity, target = self.velocity_and_target(rollouts, rows, column)
        return self.result(mean_square(velocity - target))
    def result(self, error):
        return on_rows(error)

class Mean(Mine):
    def result(self, error):
        return on_rows(error.mean())

class Detached(Mine):
    def result(self, error):
        return on_rows(error.detach())

class NotFinite(Mine):
    def result(self, error):
        return on_rows(error * float("nan"))

class Raises(Mine):
    def result(self, error):
        return {}["absent"]

class Counts(Mine):
    calls = 0
    def result(self, error):
        self.calls += 1
        return on_rows(error + 0 * torch.rand(1))

class NotFiniteMetric(Mine):
    metrics = ("loss/total", "mine/accuracy")
    def result(self, error):
        nan = error.detach() * float("nan")
        return on_rows(error, kl=nan, metrics={"loss/total": error, "mine/accuracy": nan})

class ChangesAdvantages(Mine):
    def terms(self, rollouts, reference, rows, column, *, kl_coefficient):
        rollouts.advantages[rows] *= 2  # the next column would have four times the advantages
        return super().terms(rollouts, reference, rows, column, kl_coefficient=kl_coefficient)

class Undeclared(Mine):
    def result(self, error):
        return on_rows(error, metrics={"loss/total": error, "mine/other": error})

class LikelihoodRatio(StepObjective):
    metrics, by_step = ("loss/total", "mine/log_prob"), ("mine/log_prob",)
    def terms(self, rollouts, reference, rows, column, *, kl_coefficient):
        step = rollouts.replay(self.pipeline, rows, rollouts.trained_steps[rows, column])
        loss = -rollouts.advantages[rows] * step.log_prob
        return on_rows(loss, metrics={"loss/total": loss, "mine/log_prob": step.log_prob})

class WithoutTerms(LevelObjective):
    metrics = ("loss/total",)

class Taken(Mine):
    metrics = ("loss/total", "reward/mean")

class Unrewarded(Mine):
    needs_rewards = False

number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TEXT)
    return path


@pytest.fixture
def tiny_config(tiny_config):
    return tiny_config.with_settings(pretrained_model_root=SHALLOW)


def trainer_of(config, mesh):
    return Trainer(config, mesh, CPU, scorers={"test": Redness()})


# --- training -------------------------------------------------------------------------------------


def test_a_reward_gradient_is_refused_where_it_would_be_computed_on_other_data(
    tiny_config, mesh, tmp_path
):
    changes = LEVELS | {"reward_gradient_weight": 0.1}
    file = tmp_path / "mine.py"
    file.write_text(f"{TEXT}\nclass Collects(Mine):\n    collect = lambda *_: None\n")
    config = tiny_config.with_settings(**changes, objective=f"{file}:Collects")
    with pytest.raises(ValueError, match="reward_gradient_weight .* `collect`"):
        Trainer(check(config).config, mesh, CPU)


def test_the_gradient_of_the_example_is_the_weighted_regression(tiny_config, mesh):
    """The gradient of mean(exp(A) |v - t|^2), with velocities and targets computed here."""
    config = tiny_config.with_settings(
        **LEVELS, objective=EXAMPLE, kl_weight=0.0, kl_coef=0.0, kl_min_coef=0.0
    )
    config = config.with_settings(max_grad_norm=1e9)
    trainer = trainer_of(config, mesh)
    trainer.iteration = 1
    rollouts, pending = trainer.run.source.collect(trainer.run.objective, 1, is_scored=True)
    rewards = trainer.run.rewards.wait(pending)
    rollouts = rollouts.with_rewards(
        rewards, trainer.run.rewards.advantages(rollouts.indices, rewards)[0]
    )
    final, losses = rollouts.trajectories.final, []
    for column in rollouts.columns:
        levels = rollouts.trained_steps[:, column]
        noise = [
            trainer.run.source.noise.for_renoising(1, index, column) for index in rollouts.indices
        ]
        noised = torch.stack([(1 - s) * x + s * e for s, x, e in zip(levels, final, noise)])
        velocity = trainer.run.pipeline._forward(
            noised, [(1000.0 * s, None) for s in levels.tolist()], rollouts.conditions
        )
        error = (velocity - (torch.stack(noise) - final)).square().flatten(1).mean(1)
        losses.append(rollouts.advantages.exp() * error)
    parameters = trainer.run.policy.parameters
    expected = torch.autograd.grad(torch.cat(losses).mean(), parameters, allow_unused=True)
    applied = []
    trainer.run.policy.optimizers.step = lambda rate: applied.extend(
        p.grad.clone() for p in parameters
    )
    trainer.run.update(rollouts, trainer.run.objective.prepare(rollouts), 1)
    flat = torch.cat(
        [torch.zeros(p.numel()) if g is None else g.flatten() for g, p in zip(expected, parameters)]
    )
    assert (
        torch.cat([gradient.flatten() for gradient in applied]) - flat
    ).norm() < 1e-4 * flat.norm()


def test_an_objective_on_steps_reports_its_metrics_by_step(file, tiny_config, mesh):
    trainer = trainer_of(tiny_config.with_settings(objective=f"{file}:LikelihoodRatio"), mesh)
    trainer.iteration = 1
    metrics = trainer.run_iteration()
    *trained, last = metrics["by_step/log_prob"]
    assert last is None and sum(trained) / len(trained) == pytest.approx(metrics["mine/log_prob"])
    assert metrics["by_step/max_deviation"] == [0.0] * len(trained) + [None]


# --- errors before a run --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "number",
            "must name a class that inherits from StepObjective or LevelObjective .*, got 3",
        ),
        ("Taken", "cannot report reward/mean, which the run itself reports; rename it"),
    ],
)
def test_an_invalid_class_is_reported_once_before_a_run(file, tiny_config, name, message):
    with pytest.raises(ValueError, match=message) as error:
        check(tiny_config.with_settings(objective=f"{file}:{name}"))
    assert len(str(error.value).splitlines()) == 1
    check(tiny_config.with_settings(objective=f"{file}:Mine"))


@pytest.mark.parametrize(
    "text, message",
    [
        ("import absent_module", "bad.py.*ModuleNotFoundError: No module named 'absent_module'"),
        (None, "objective: file not found: .*bad.py"),
    ],
)
def test_a_file_that_cannot_be_imported_is_reported(tiny_config, tmp_path, text, message):
    if text:
        (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        check(tiny_config.with_settings(objective=f"{tmp_path}/bad.py:Mine"))


# --- a trial before the first rollouts -------------------------------------------------------------


@pytest.mark.parametrize(
    "name, part",
    [
        ("Mean", "loss"),
        ("Detached", "loss"),
        ("ChangesAdvantages", "rollouts.advantages"),
        ("Undeclared", "mine/other"),
        ("Raises", "KeyError: 'absent'"),
    ],
)
def test_a_wrong_result_is_rejected_before_the_first_rollouts(file, tiny_config, mesh, name, part):
    with pytest.raises(ValueError) as error:
        trainer_of(tiny_config.with_settings(**LEVELS, objective=f"{file}:{name}"), mesh)
    message = str(error.value)
    assert f"mine.py:{name}" in message and part in message and len(message.splitlines()) == 1
    trainer_of(tiny_config.with_settings(**LEVELS, objective=f"{file}:Mine"), mesh)


def test_the_trial_leaves_the_objective_and_the_random_numbers_as_they_are(file, tiny_config, mesh):
    state = torch.random.get_rng_state()
    trainer = trainer_of(tiny_config.with_settings(objective=f"{file}:Counts"), mesh)
    objective = trainer.run.objective
    assert objective.calls == 0 and objective.cost.forwards == 0
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_loss_that_is_not_finite_stops_the_run_before_the_first_step(file, tiny_config, mesh):
    """Not in the trial, because the latents of the trial are random."""
    trainer = trainer_of(tiny_config.with_settings(**LEVELS, objective=f"{file}:NotFinite"), mesh)
    trainer.iteration = 1
    with pytest.raises(ValueError, match="NotFinite must return a finite loss, got nan"):
        trainer.run_iteration()
    assert trainer.run.update.steps_begun == 0


# --- metrics and gradients ------------------------------------------------------------------------


def test_metrics_that_are_not_finite_are_recorded_and_the_update_is_applied(
    file, tiny_config, mesh
):
    config = tiny_config.with_settings(**LEVELS, objective=f"{file}:NotFiniteMetric")
    trainer = trainer_of(config.with_settings(kl_schedule="adaptive"), mesh)
    coefficient = trainer.run.update.kl_coefficient.value
    before = weights(trainer)
    trainer.iteration = 1
    metrics = trainer.run_iteration()
    assert metrics["loss/total"] > 0 and math.isnan(metrics["mine/accuracy"])
    assert metrics["update/skipped"] == 0 and metrics["grad/norm"] > 0
    assert trainer.run.update.kl_coefficient.value == coefficient
    assert not all(map(torch.equal, before, weights(trainer)))


# --- identity -------------------------------------------------------------------------------------


@pytest.mark.system
def test_a_run_resumes_and_rejects_an_edited_file(file, tiny_config, mesh):
    config = tiny_config.with_settings(**LEVELS, objective=f"{file}:Mine", max_steps=1)
    assert code_of(config)["objective"] == [file]
    assert "objective" not in code_of(tiny_config)
    trainer_of(config, mesh).train()
    config = config.with_settings(max_steps=2)
    trainer_of(config, mesh)
    file.write_text(TEXT.replace("velocity - target", "2 * (velocity - target)"))
    with pytest.raises(ValueError, match="--allow_changed_settings objective$"):
        trainer_of(config, mesh)
