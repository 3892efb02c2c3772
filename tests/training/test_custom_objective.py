"""Setting ``objective FILE.py:NAME``: checked before a run, trained with, compared on resume."""

import math

import pytest
import torch

from hyvideo.checks.rules import check
from hyvideo.settings.identity import code_of
from hyvideo.trainer import Trainer
from hyvideo.training.iteration import sample
from tests.forked import ROOT
from tests.test_trainer import Redness, weights

CPU = torch.device("cpu")
EXAMPLE = f"{ROOT}/examples/custom_objective.py:WeightedRegression"
LEVELS = {"nft_levels": 2, "eta": 0.0, "learning_rate": 1e-3}
TEXT = """
from typing import ClassVar
import torch
from hyvideo.loss.nft import mean_square
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

class NotFiniteMetric(Mine):
    metrics = ("loss/total", "mine/accuracy")
    def result(self, error):
        nan = error.detach() * float("nan")
        return on_rows(error, kl=nan, metrics={"loss/total": error, "mine/accuracy": nan})

class ChangesAdvantages(Mine):
    def terms(self, rollouts, reference, rows, column, *, kl_coefficient):
        rollouts.advantages[rows] *= 2  # the next column would have four times the advantages
        return super().terms(rollouts, reference, rows, column, kl_coefficient=kl_coefficient)

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

class Unlisted(Mine):
    metrics = ("loss/total")

class Iteration(Mine):
    metrics = ("loss/total", "iteration")

class Unrewarded(Mine):
    needs_rewards = False

number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TEXT)
    return path


def trainer_of(config, mesh):
    return Trainer(config, mesh, CPU, scorers={"test": Redness()})


# --- training -------------------------------------------------------------------------------------


def test_the_gradient_of_the_example_is_the_weighted_regression(tiny_config, mesh):
    """The gradient of mean(exp(A) |v - t|^2), with velocities and targets computed here."""
    config = tiny_config.with_settings(
        **LEVELS, objective=EXAMPLE, kl_weight=0.0, max_grad_norm=1e9
    )
    trainer = trainer_of(config, mesh)
    trainer.iteration = 1
    rollouts, pending = sample(trainer.run, 1)
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
        ("Iteration", "cannot report iteration, which the run itself reports; rename it"),
        (
            "Unlisted",
            r"must list the names of its metrics in `metrics`, such as .*, got 'loss/total'",
        ),
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


# --- the first update ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, error, part",
    [
        ("Mean", AssertionError, "one number per row"),
        ("Detached", RuntimeError, "does not require grad"),
        ("ChangesAdvantages", ValueError, "rollouts.advantages"),
    ],
)
def test_a_wrong_result_is_an_error_of_the_first_update(file, tiny_config, mesh, name, error, part):
    """A loss of shape (rows, 1) or () would be summed without a word."""
    trainer = trainer_of(tiny_config.with_settings(**LEVELS, objective=f"{file}:{name}"), mesh)
    trainer.iteration = 1
    with pytest.raises(error, match=part):
        trainer.run_iteration()
    assert trainer.run.update.steps_begun == 0


def test_a_loss_that_is_not_finite_changes_nothing(file, tiny_config, mesh):
    trainer = trainer_of(tiny_config.with_settings(**LEVELS, objective=f"{file}:NotFinite"), mesh)
    trainer.iteration = 1
    assert trainer.run_iteration()["update/skipped"] == 1
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
