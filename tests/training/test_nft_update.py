"""objective nft in the loop of a run: it trains, and stops where the old policy is not what it is taken for."""

import pytest
import torch

from hyvideo.config.command_line import load_config
from hyvideo.records.stage_timer import StageTimer
from hyvideo.trainer import Trainer
from hyvideo.training.nft_update import NFTUpdate
from hyvideo.training.on_policy_check import OffPolicyError

CPU = torch.device("cpu")
NFT = {"objective": "nft", "nft_levels": 2, "eta": 0.0, "random_weights": False, "num_updates_per_rollout": 2}


@pytest.fixture
def trainer(tiny_config, mesh, tmp_path):
    settings = NFT | {"output_dir": str(tmp_path), "learning_rate": 1e-3, "update_ref_model_step": 2}
    return Trainer(tiny_config.with_settings(**settings), mesh, CPU)


def rollouts_of(trainer):
    trainer.iteration = 1
    rollouts, pending = trainer.collector.collect(1, StageTimer(CPU), keep_means=trainer.update.reads_means())
    rewards = trainer.rewards.wait(pending)
    return rollouts.scored(rewards, trainer.rewards.advantages(rollouts.indices, rewards)[0])


def test_rollouts_have_levels_of_their_own_in_every_part_of_the_range(trainer):
    levels = trainer.collector.noise.levels(1, trainer.collector.indices(), 4, shift=1.0)
    assert (levels.sort(1).values * 4).floor().tolist() == [[0, 1, 2, 3]] * len(levels)
    assert len(levels.unique()) == levels.numel()


def test_an_iteration_trains_and_the_old_policy_stays_that_of_the_rollouts(trainer):
    assert isinstance(trainer.update, NFTUpdate)
    rollouts = rollouts_of(trainer)
    anchor = trainer.update.anchor_means(rollouts)
    metrics = trainer.update(rollouts, anchor, 1)
    assert metrics["policy/ratio_first_deviation"] == 0 < metrics["policy/ratio_max_deviation"]
    assert metrics["kl/velocity"] > 0 and metrics["grad/norm"] > 0
    with torch.no_grad():  # the policy has moved away from the old one
        now = trainer.update._velocity(rollouts, [0], 0)[0]
    assert not torch.equal(now, trainer.update.old_velocities[:1, 0])


def of_another_policy(trainer):
    with torch.no_grad():
        for parameter in trainer.policy.parameters:
            parameter.mul_(1.05)


def with_an_old_policy_of_its_own(trainer):
    trainer.update.old_velocities = trainer.update.old_velocities * 1.1


@pytest.mark.parametrize(
    "plant, message",
    [
        (of_another_policy, "first step of the rollouts"),
        (with_an_old_policy_of_its_own, "off the old one"),
    ],
)
def test_a_planted_fault_stops_the_run_before_the_first_update(trainer, plant, message):
    rollouts = rollouts_of(trainer)
    anchor = trainer.update.anchor_means(rollouts)
    plant(trainer)
    before = [parameter.clone() for parameter in trainer.policy.parameters]
    with pytest.raises(OffPolicyError, match=message):
        trainer.update(rollouts, anchor, 1)
    assert all(map(torch.equal, before, trainer.policy.parameters))


def test_levels_in_other_units_stop_the_run(trainer, monkeypatch):
    """Timesteps of 0 to 1 where the transformer takes 0 to 1000."""
    rollouts = rollouts_of(trainer)
    velocity = trainer.pipeline.velocity

    def unscaled(latents, timestep, conditions):
        is_of_schedule = torch.isin(timestep, trainer.pipeline.scheduler.timesteps).all()
        return velocity(latents, timestep if is_of_schedule else timestep / 1000, conditions)

    monkeypatch.setattr(trainer.pipeline, "velocity", unscaled)
    anchor = trainer.update.anchor_means(rollouts)
    with pytest.raises(OffPolicyError, match="in units of that of zeros"):
        trainer.update(rollouts, anchor, 1)


def test_the_shipped_config_is_of_this_objective():
    config = load_config("configs/miniature_nft.yaml")
    assert (config.loss.objective, config.rollout.eta) == ("nft", 0)
