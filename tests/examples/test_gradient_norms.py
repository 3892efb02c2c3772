"""Gradient norms per step equal those of training, and the program writes nothing but its file."""

import dataclasses
import json

import pytest
import torch

from examples.gradient_norms import (
    main,
    measurement,
    norms_per_visit,
    scored_rollouts,
    spread,
    summarise,
)
from hyvideo.distributed import mesh as ranks
from hyvideo.trainer import Trainer
from tests.distributed.launch import launch

CPU = torch.device("cpu")


@pytest.fixture
def measured(tiny_config):
    return measurement(tiny_config.with_settings(mini_batch_size_per_update=4))


def norms_under(trainer, rollouts, weights):
    trainer.run.objective.step_weights = lambda schedule: weights
    return norms_per_visit(trainer.run.update, rollouts)


def test_weighted_norms_divided_by_the_weights_are_unweighted_norms(measured, mesh):
    trainer = Trainer(measured, mesh, CPU)
    rollouts = scored_rollouts(trainer)
    weights = trainer.run.objective.step_weights(rollouts.schedule)
    before = [parameter.detach().clone() for parameter in trainer.run.policy.parameters]
    weighted = norms_under(trainer, rollouts, weights)
    without = norms_under(trainer, rollouts, torch.ones_like(weights))
    result = summarise(measured, weights, weighted)
    assert [step["norm"] for step in result["steps"]] == pytest.approx(without, rel=1e-5)
    assert [step["norm_weighted"] for step in result["steps"]] == pytest.approx(weighted)
    assert len(result["steps"]) == 3 and min(without) > 0
    assert spread(result["steps"], "norm") == pytest.approx(max(without) / min(without), rel=1e-5)
    assert all(map(torch.equal, before, trainer.run.policy.parameters))
    assert all(parameter.grad is None for parameter in trainer.run.policy.parameters)


def test_the_norm_of_a_step_is_that_of_an_update_on_this_step(measured, mesh):
    trainer = Trainer(measured, mesh, CPU)
    rollouts = scored_rollouts(trainer)
    norms = norms_per_visit(trainer.run.update, rollouts)
    last = dataclasses.replace(rollouts, trained_steps=rollouts.trained_steps[:, -1:])
    metrics = trainer.run.update(last, {}, iteration=1)
    assert metrics["grad/norm"] == pytest.approx(norms[-1], rel=1e-5)
    assert metrics["loss/total"] == metrics["loss/policy"]  # the KL term is off


def norms_on_several(settings):
    from hyvideo.settings.command_line import load_config

    mesh = ranks.start(1, CPU)
    return norms_per_visit(
        (trainer := Trainer(load_config(**settings), mesh, CPU)).run.update,
        scored_rollouts(trainer),
    )


@pytest.mark.slow
@pytest.mark.parametrize("enable_fsdp", [False, True], ids=["whole", "sharded"])
def test_two_processes_measure_the_same_as_one(measured, mesh, tmp_path, enable_fsdp):
    trainer = Trainer(measured, mesh, CPU)
    expected = norms_per_visit(trainer.run.update, scored_rollouts(trainer))
    shared = {"batch_size": 4, "enable_fsdp": enable_fsdp, "max_steps": 1}
    shared |= {"output_dir": str(tmp_path / "two")}
    settings = {"path": "configs/smoke.yaml"} | measured.with_settings(**shared).flat()
    first, second = launch("tests.examples.test_gradient_norms:norms_on_several", 2, settings)
    assert first == second == pytest.approx(expected, rel=1e-4)


@pytest.mark.system
def test_the_program_writes_only_its_file(tiny_config, tmp_path, capsys):
    out = tmp_path / "new"
    main(["--config", "configs/smoke.yaml", "--output_dir", str(out), "--num_threads", "1"])
    assert [*tmp_path.rglob("*")] == [out, out / "gradients.json"]
    result = json.loads((out / "gradients.json").read_text())
    assert (result["sde_type"], result["num_steps"], result["last_step"]) == (
        "sage_grpo",
        4,
        "deterministic",
    )
    for step in result["steps"]:
        assert step["norm"] * step["weight"] == pytest.approx(step["norm_weighted"])
