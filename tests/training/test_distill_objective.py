"""Training with objective distill: the targets of the teacher, its checks, other teachers, ranks
and resume.
"""

import pytest
import torch
from torch import nn

from hyvideo.checks.rules import check
from hyvideo.models.conditions import Conditions
from hyvideo.models.guidance import Guidance
from hyvideo.models.sizes import read_architecture
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, SamplerSettings
from hyvideo.planning.hours import forwards_per_rollout
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import refined_levels, shifted_levels
from hyvideo.trainer import Trainer
from hyvideo.training.iteration import sample
from hyvideo.training.on_policy_check import OffPolicyError
from tests.shallow import SHALLOW
from tests.test_trainer import CPU, Redness, weights
from tests.training.test_run_state import train_iterations

STUDENT = {
    "objective": "distill",
    "eta": 0.0,
    "cfg_scale": 1.0,
    "kl_strategy": "fixed",
    "grpo_sampling_steps": 2,
    "anchor_substeps": 3,
    "anchor_cfg_scale": 3.0,
    "learning_rate": 1e-3,
}


class NeverScores(Redness):
    def score(self, videos, prompts, *, fps):
        raise AssertionError("no rollout of a student is scored")


@pytest.fixture
def student(tiny_config):
    return tiny_config.with_settings(**STUDENT, pretrained_model_root=SHALLOW).resolved()


def trainer_of(config, mesh):
    return Trainer(config, mesh, CPU, scorers={"test": NeverScores()})


def sample_rollouts(trainer):
    trainer.iteration = 1
    rollouts, _ = sample(trainer.run, 1)
    return rollouts.with_rewards({}, torch.zeros(len(rollouts)))


# --- targets --------------------------------------------------------------------------------------


class GaussianFlow(nn.Module):
    """The exact velocity of data ~ N(1.3, 0.5^2)."""

    step_cache = modulation_cache = None
    is_flow_map = False

    def forward(self, latents, *, timestep, conditions, ends):
        sigma = (timestep / 1000).view(-1, 1, 1, 1, 1)
        centered = (latents - (1 - sigma) * 1.3) / ((1 - sigma) ** 2 * 0.25 + sigma**2)
        return sigma * centered - (1.3 + (1 - sigma) * 0.25 * centered)

    @staticmethod
    def flow(latents, sigma, end):
        def std(level):
            return ((1 - level) ** 2 * 0.25 + level**2) ** 0.5

        return (1 - end) * 1.3 + std(end) / std(sigma) * (latents - (1 - sigma) * 1.3)


def test_the_target_converges_to_the_mean_velocity_of_the_flow_with_an_error_of_one_over_the_substeps():
    pipeline = GRPOPipeline(GaussianFlow(), nn.Identity(), sampling=SamplerSettings(Guidance(1.0)))
    latents = torch.linspace(-2, 2, 6).view(3, 1, 1, 1, 2)
    starts, levels = [0, 1, 3], shifted_levels(4, 3.0)
    ends = [start + 1 for start in starts]
    conditions = Conditions((None,) * 3)
    expected = torch.stack(
        [
            (GaussianFlow.flow(sample, levels[start], levels[end]) - sample)
            / (levels[end] - levels[start])
            for sample, start, end in zip(latents, starts, ends)
        ]
    )
    errors = []
    for substeps in (32, 64, 128):
        fine = Schedule.at(refined_levels(4, 3.0, None, substeps))
        found = pipeline.mean_velocity(
            latents, fine, [start * substeps for start in starts], substeps, conditions
        )
        errors.append((found - expected).abs().amax().item())
    assert errors[0] < 0.1 and errors[0] / errors[1] == pytest.approx(2, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.1)


def test_the_levels_of_the_teacher_divide_the_steps_of_the_student():
    fine = refined_levels(4, 5.0, None, 6)
    assert fine == shifted_levels(24, 5.0) and fine[::6] == shifted_levels(4, 5.0)
    given = refined_levels(3, 5.0, "1,0.757,0.522", 4)
    assert given[::4] == (1.0, 0.757, 0.522, 0.0) and len(given) == 13
    of_shift = ",".join(map(repr, shifted_levels(4, 5.0)[:-1]))  # the same levels, given explicitly
    assert refined_levels(4, 5.0, of_shift, 6) == pytest.approx(fine, abs=1e-12)


def test_the_targets_are_those_of_the_guided_base_model_from_the_latents_of_the_student(
    student, mesh
):
    trainer = trainer_of(student, mesh)
    rollouts = sample_rollouts(trainer)
    targets = trainer.run.objective.prepare(rollouts)
    assert trainer.run.pipeline.sampling.guidance.scale == 1.0  # only the teacher is guided
    guided = trainer.run.pipeline.with_guidance(Guidance(3.0))
    fine = Schedule.ode(6, student.rollout.shift)
    latents, levels = rollouts.trajectories.latents, rollouts.schedule.sigmas
    for row in (0, 3):
        for column in rollouts.columns:
            step = rollouts.trained_steps[row, column].item()
            part = Schedule.at(fine.sigmas[3 * step : 3 * step + 4])
            conditions = rollouts.conditions.select([row])
            reached = guided.sample_ode(conditions, latents[row : row + 1, step], part)
            expected = (reached - latents[row : row + 1, step]) / (levels[step + 1] - levels[step])
            torch.testing.assert_close(targets[column][row], expected[0], rtol=1e-4, atol=1e-4)
    assert sorted(rollouts.trained_steps[0].tolist()) == [0, 1]


def test_the_gradient_is_that_of_the_squared_distance_to_the_target(student, mesh):
    config = student.with_settings(max_grad_norm=1e9)
    trainer = trainer_of(config, mesh)
    rollouts = sample_rollouts(trainer)
    targets = trainer.run.objective.prepare(rollouts)
    loss = 0.0
    for column in rollouts.columns:
        steps = rollouts.trained_steps[:, column].tolist()
        latents = torch.stack(
            [rollouts.trajectories.latents[row, step] for row, step in enumerate(steps)]
        )
        velocity = trainer.run.pipeline.velocity_at_steps(
            latents, rollouts.schedule, steps, rollouts.conditions
        )
        loss = loss + (velocity - targets[column]).square().mean() / 2
    expected = torch.autograd.grad(loss, trainer.run.policy.parameters)
    norm = torch.stack([gradient.square().sum() for gradient in expected]).sum().sqrt().item()
    metrics = trainer.run.update(rollouts, targets, 1)
    assert metrics["loss/total"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad/norm"] == pytest.approx(norm, rel=1e-4)


# --- checks ---------------------------------------------------------------------------------------


def test_a_teacher_that_is_not_the_initial_student_stops_the_run(student, mesh):
    trainer = trainer_of(student, mesh)
    name = next(iter(trainer.run.policy.trained))
    trainer.run.policy.anchor._copies[name].add_(0.1)
    before = weights(trainer)
    with pytest.raises(
        OffPolicyError, match="difference between teacher and student before the first update"
    ):
        train_iterations(trainer, 1)
    assert all(map(torch.equal, before, weights(trainer)))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"eta": 0.5}, "objective distill needs eta 0, .*, got 0.5"),
        (
            {"anchor_path": "no_such_folder"},
            "anchor_path must be a checkpoint of a run, or a LoRA .*no_such_folder",
        ),
    ],
)
def test_settings_of_other_objectives_raise_an_error(student, changes, message):
    check(student)
    with pytest.raises(ValueError, match=message):
        check(student.with_settings(**changes))


def test_a_group_may_have_one_rollout_and_validation_has_the_steps_of_the_student(student):
    check(student.with_settings(num_generations=1, batch_size=3))
    unset = student.with_settings(validation_steps=None)
    assert unset.resolved().validation.validation_steps == 2
    assert unset.with_settings(objective="grpo").resolved().validation.validation_steps == 40


# --- runs -----------------------------------------------------------------------------------------


def test_without_validation_no_scorer_is_loaded(student, mesh):
    # which is not in the folder of the model
    config = student.with_settings(reward_model=["videoalign"])
    assert Trainer(config, mesh, CPU).run.scorer.scorers == {}


def test_a_guidance_interval_limits_the_guided_substeps_in_plan_and_run(student, mesh):
    config = student.with_settings(guidance_interval="0.5:1", gate_interval=0)
    trainer = trainer_of(config, mesh)
    lines = train_iterations(trainer, 1)
    levels = shifted_levels(6, config.rollout.shift)[:-1]
    num_guided = sum(level >= 0.5 for level in levels)
    assert 0 < num_guided < 6 and float(lines[0]["cost/forwards"]) == 2 + 6 + num_guided + 2 * 3
    run = PlannedRun(trainer.config, 1, read_architecture(SHALLOW, "miniature"))
    assert forwards_per_rollout(run) == pytest.approx(2 + 6 + num_guided + 2 * 3)


@pytest.mark.system
def test_the_teacher_may_be_a_checkpoint_of_another_run(student, mesh, tmp_path):
    config = student.with_settings(max_steps=1, lora_rank=2)
    trained = trainer_of(config, mesh)
    trained.train()
    folder = tmp_path / "run" / "checkpoints" / "000001"
    given = {
        "anchor_path": str(folder),
        "output_dir": str(tmp_path / "second"),
        "anchor_substeps": 1,
    }
    second = config.with_settings(**given, anchor_cfg_scale=1.0)
    check(second)
    trainer = trainer_of(second, mesh)
    anchor = trainer.run.policy.anchor
    assert anchor.is_given and not anchor.equals_policy
    expected = {name: parameter.detach() for name, parameter in trained.run.policy.trained.items()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in anchor.tensors().items())
    (line,) = train_iterations(trainer, 1)
    assert float(line["loss/total"]) > 0
    # A resume before the first update keeps the teacher.
    trainer.run.policy.load(folder, 0)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in anchor.tensors().items())
    of_file = trainer_of(second.with_settings(anchor_path=str(folder / "lora")), mesh)
    found = of_file.run.policy.anchor.tensors()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    with pytest.raises(ValueError, match="modules, rank and alpha of this run"):
        trainer_of(second.with_settings(anchor_path=str(folder / "lora"), lora_rank=3), mesh)
    with pytest.raises(ValueError, match="has shape|no tensor"):
        trainer_of(second.with_settings(lora_rank=3), mesh)
    with pytest.raises(ValueError, match="000001 has no tensor policy"):
        trainer_of(second.with_settings(lora_rank=0), mesh)


@pytest.mark.system
def test_a_resume_with_another_teacher_uses_it(student, mesh, tmp_path):
    config = student.with_settings(max_steps=1, save_interval=1, lora_rank=2)
    teacher = config.with_settings(output_dir=str(tmp_path / "teacher"), seed=5)
    trainer_of(teacher, mesh).train()
    first = trainer_of(config, mesh)
    base = {name: tensor.clone() for name, tensor in first.run.policy.anchor.tensors().items()}
    first.train()
    other = str(tmp_path / "teacher" / "checkpoints" / "000001")

    def anchor_after(steps, **changes):
        """Train up to ``steps`` iterations and return the teacher's weights."""
        trainer = trainer_of(
            config.with_settings(
                allow_changed_settings=["anchor_path"], **changes, max_steps=steps
            ),
            mesh,
        )
        trainer.train()
        return trainer.run.policy.anchor.tensors()

    given = trainer_of(
        config.with_settings(anchor_path=other, output_dir=str(tmp_path / "third")), mesh
    ).run.policy.anchor.tensors()
    assert not all(torch.equal(given[name], base[name]) for name in base)
    found = anchor_after(2, anchor_path=other)
    assert all(torch.equal(found[name], given[name]) for name in given)
    found = anchor_after(3, anchor_path=other)  # from a checkpoint that has the new teacher
    assert all(torch.equal(found[name], given[name]) for name in given)
    found = anchor_after(4)
    assert all(torch.equal(found[name], base[name]) for name in base)
