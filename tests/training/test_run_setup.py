"""Every setting reaches the component that uses it, tested with values other than the defaults."""

import pytest
import torch

from hyvideo.config.settings import Config
from hyvideo.trainer import Trainer
from hyvideo.training import run_setup
from tests.test_trainer import CPU, Redness

OFF_DEFAULT = {
    "clip_range": 0.03,
    "use_grad_balancing": False,
    "gate_interval": 7,
    "gate_tolerance": 0.25,
    "kl_strategy": "dual_fixed",
    "kl_velocity": "gaussian",
    "dual_kl_moving_weight": 0.6,
    "dual_kl_step_weight": 0.3,
    "kl_weight": 0.5,
    "kl_coef": 0.02,
    "kl_min_coef": 0.01,
    "kl_schedule": "adaptive",
    "kl_feedback": "lagrangian",
    "kl_warmup_updates": 3,
    "kl_window": 4,
    "kl_gain": 0.2,
    "kl_target": 0.07,
    "learning_rate": 3e-3,
    "weight_decay": 0.02,
    "adam_beta1": 0.8,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 1e-3,
    "max_bad_updates": 5,
    "warmup_steps": 4,
    "use_muon": True,
    "muon_momentum": 0.7,
    "ema_decay": 0.9,
    "advantage_clip": 0.4,
}


@pytest.fixture
def trainer(tiny_config, mesh):
    return Trainer(tiny_config.with_settings(**OFF_DEFAULT), mesh, CPU, scorers={"test": Redness()})


def test_the_values_differ_from_the_defaults():
    defaults = Config().flat()
    same = [name for name, value in OFF_DEFAULT.items() if value == defaults[name]]
    assert same in ([], ["kl_schedule", "use_muon"])  # their other values would disable what the tests check


def test_loss_and_trust_region_follow_the_settings(trainer):
    update = trainer.update
    assert (update.kl_weights.position, update.kl_weights.velocity) == (0.6, 0.3)
    schedule = update.kl_coefficient.settings
    assert (schedule.schedule, schedule.feedback, schedule.initial) == ("adaptive", "lagrangian", 0.02)
    assert (schedule.minimum, schedule.maximum, schedule.target) == (0.01, 0.5, 0.07)
    assert (schedule.warmup_updates, schedule.window, schedule.gain) == (3, 4, 0.2)
    assert update.kl_coefficient.value == 0.02 and update.kl_coefficient.recent.maxlen == 4
    check = update.on_policy_check
    assert (check.tolerances, check.is_due(7), check.is_due(6)) == ((0.25, 0.25), True, False)
    assert update.nonfinite.max_bad_updates == 5
    assert set(update.step_weights.tolist()) == {0.0, 1.0}  # without the equalizer
    assert trainer.policy.anchor.refresh_every is None


def test_optimizers_follow_the_settings_and_each_parameter_has_one(trainer):
    adamw, muon = trainer.policy.optimizers.optimizers
    (group,) = adamw.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (3e-3, (0.8, 0.98), 1e-6, 0.02)
    (group,) = muon.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (3e-3, 0.7, 0.02)
    names = {id(parameter): name for name, parameter in trainer.policy.trained.items()}
    by_muon = {names[id(p)] for p in muon.param_groups[0]["params"]}
    by_adamw = {names[id(p)] for p in adamw.param_groups[0]["params"]}
    assert by_muon | by_adamw == set(trainer.policy.trained) and not by_muon & by_adamw
    blocks = {name for name in trainer.policy.trained if name.startswith("transformer_blocks.")}
    matrices = {name for name in blocks if trainer.policy.trained[name].ndim == 2 and ".norm" not in name}
    assert by_muon == {name for name in matrices if name.split(".")[2] in ("attn", "ff", "ff_context")}


def test_an_iteration_uses_gradient_clipping_learning_rate_and_advantage_clipping(trainer):
    applied = []
    step = trainer.policy.optimizers.step

    def record_step(rate):
        applied.append((rate, torch.stack([p.grad.norm() for p in trainer.policy.parameters]).norm().item()))
        step(rate)

    trainer.policy.optimizers.step = record_step
    trainer.iteration = 1
    seen = []
    terms = trainer.update.terms
    trainer.update.terms = lambda rollouts, *others: (seen.append(rollouts), terms(rollouts, *others))[1]
    metrics = trainer.run_iteration()
    assert applied[0][0] == pytest.approx(3e-3 / 4) == metrics["lr"]
    assert metrics["grad/norm"] > 1e-3 and applied[0][1] == pytest.approx(1e-3, rel=1e-3)
    assert seen[0].advantages.abs().max().item() == pytest.approx(0.4)


@pytest.mark.parametrize("clip_range, share", [(1e-7, 1.0), (1e3, 0.0)])
def test_clip_fraction_depends_on_the_clip_range(tiny_config, mesh, clip_range, share):
    config = tiny_config.with_settings(clip_range=clip_range, num_updates_per_rollout=2, learning_rate=1e-2)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    trainer.iteration = 1
    second = []
    one_update = trainer.update._one_update
    trainer.update._one_update = lambda *a, **o: (second.append(one_update(*a, **o)), second[-1])[1]
    trainer.run_iteration()
    assert second[1].metrics["policy/clip_fraction"] == pytest.approx(share, abs=0.05)


def test_an_unusable_adapter_is_rejected_before_anything_is_loaded(tiny_config, mesh, monkeypatch):
    monkeypatch.setattr(run_setup, "load_encoder", None)
    config = tiny_config.with_settings(lora_rank=2, lora_target_modules=["nothing"])
    with pytest.raises(ValueError, match="no linear layer"):
        Trainer(config, mesh, CPU, scorers={"test": Redness()})


def test_muon_trains_every_matrix_with_scope_all(tiny_config, mesh):
    trainer = Trainer(tiny_config.with_settings(use_muon=True, muon_scope="all"), mesh, CPU, scorers={"t": Redness()})
    _, muon = trainer.policy.optimizers.optimizers
    assert {id(p) for p in muon.param_groups[0]["params"]} == {id(p) for p in trainer.policy.parameters if p.ndim >= 2}
