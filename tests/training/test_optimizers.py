"""Optimizers of a run combined into one."""

import pytest
import torch

from hyvideo.data.prompts import Request
from hyvideo.models.sizes import read_architecture
from hyvideo.planning.persistent import optimizer_bytes
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.sections import OptimizerSettings
from hyvideo.training.muon import Muon
from hyvideo.training.optimizers import learning_rate, make_optimizers
from hyvideo.training.policy import Policy


def test_adamw_takes_the_steps_of_its_equation():
    settings = OptimizerSettings(
        optimizer="adamw",
        learning_rate=0.1,
        betas=[0.5, 0.9],
        adam_epsilon=0.01,
        weight_decay=0.2,
    )
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizers = make_optimizers(settings, {"weight": weight}, torch.float32, hidden=HIDDEN)
    expected, first, second = 1.0, 0.0, 0.0
    for count, gradient in enumerate((2.0, -1.0, 0.5), 1):
        weight.grad = torch.full_like(weight, gradient)
        optimizers.step(0.1)
        first = 0.5 * first + 0.5 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        direction = first / (1 - 0.5**count) / ((second / (1 - 0.9**count)) ** 0.5 + 0.01)
        expected = expected - 0.1 * 0.2 * expected - 0.1 * direction
        assert weight.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_planner_counts_the_state_of_the_real_optimizers(tiny_config, mesh, rank, optimizer):
    config = tiny_config.with_settings(
        pretrained_model_root="assets/miniature",
        lora_rank=rank,
        kl_weight=0.0,
        optimizer=optimizer,
    )
    policy = Policy(config, mesh, torch.device("cpu"), [Request("a red circle moves up")])
    for parameter in policy.parameters:
        parameter.grad = torch.zeros_like(parameter)
    policy.optimizers.step(0.0)
    states = [
        state
        for parameter in policy.parameters
        for state in policy.optimizers.state_of(parameter).values()
    ]
    counted = sum(state.nbytes for state in states if state.ndim)  # without step counts
    model = config.model
    planned = optimizer_bytes(
        PlannedRun(config, 1, read_architecture(model.pretrained_model_root, "miniature"))
    )
    if not rank:  # the planner also counts parameters that are frozen because no request uses them
        frozen = sum(
            parameter.numel()
            for parameter in policy.transformer.parameters()
            if not parameter.requires_grad
        )
        planned -= 4 * frozen * 2
    assert planned == pytest.approx(counted, rel=0.04)


HIDDEN = r"blocks\.\d+\.ff\.weight|blocks\.\d+\.ff\.lora_[AB]\.weight"


def by_muon(**settings):
    """Return the names of the parameters that Muon trains."""
    shapes = {"blocks.0.ff.weight": (4, 4), "blocks.0.ff.bias": (4,), "embed.weight": (4, 4)}
    shapes |= {"blocks.0.ff.lora_A.weight": (2, 4), "blocks.0.ff.lora_B.weight": (4, 2)}
    trained = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    optimizers = make_optimizers(
        OptimizerSettings(**settings), trained, torch.float32, hidden=HIDDEN
    ).optimizers
    assert all(
        optimizer.dtype == torch.float32 for optimizer in optimizers if isinstance(optimizer, Muon)
    )
    names = {id(parameter): name for name, parameter in trained.items()}
    of = {
        type(o): {names[id(p)] for group in o.param_groups for p in group["params"]}
        for o in optimizers
    }
    assert set().union(*of.values()) == set(trained)
    return of.get(Muon, set())


def test_the_factors_of_a_lora_are_trained_by_muon_only_with_scope_all():
    factors = {"blocks.0.ff.lora_A.weight", "blocks.0.ff.lora_B.weight"}
    assert by_muon(optimizer="muon") == {"blocks.0.ff.weight"}
    assert by_muon(optimizer="muon_all") == {"blocks.0.ff.weight", "embed.weight"} | factors
    assert by_muon(optimizer="adamw") == set()


def test_the_learning_rate_rises_linearly_and_reaches_its_value_at_the_last_update_of_the_warmup():
    rates = [
        learning_rate(OptimizerSettings(learning_rate=0.8, warmup_steps=4), n) for n in range(6)
    ]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert learning_rate(OptimizerSettings(learning_rate=0.8), 0) == 0.8
