"""Updates without a signal are skipped: Adam and Muon would turn the rounding of their gradient
into full steps.
"""

import pytest
import torch

from hyvideo.trainer import Trainer
from tests.test_trainer import CPU, Redness, run, weights

NFT = {"objective": "nft", "nft_levels": 2, "eta": 0.0, "gate_interval": 0}
TWO_UPDATES = {"num_updates_per_rollout": 2, "update_ref_model_step": 2}
SKIPPED = "iteration 1: number of updates skipped: "
KL_ALONE = "number of updates that train the KL alone: "


class Rewards(Redness):
    """Gives these rewards in turn, the same ones for each group."""

    def __init__(self, *rewards):
        self.rewards, self.calls = rewards, 0

    def score(self, videos, prompts, *, fps):
        values = [self.rewards[i % len(self.rewards)] for i in range(len(videos))]
        return [{"VQ": value, "MQ": value, "TA": value} for value in values]


class FirstGroupDiffers(Redness):
    """Rewards the redness of the videos of one prompt; the rewards of the other one are equal."""

    def __init__(self, prompt):
        self.prompt = prompt

    def score(self, videos, prompts, *, fps):
        scores = super().score(videos, prompts, fps=fps)
        equal = {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}
        return [row if prompt == self.prompt else equal for row, prompt in zip(scores, prompts)]


@pytest.mark.parametrize("settings", [{"optimizer": "muon"} | TWO_UPDATES, NFT | TWO_UPDATES])
def test_equal_rewards_do_not_move_the_policy(tiny_config, mesh, capsys, settings):
    config = tiny_config.with_settings(**settings, learning_rate=1e-2, ema_decay=0.5)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Rewards(0.7)})
    before = weights(trainer)
    num_updates = config.objective.updates
    for trainer.iteration in (1, 2):
        metrics = trainer.run_iteration()
        assert (
            metrics["update/without_signal"] == num_updates
            and metrics["advantage/zero_groups"] == 2
        )
        assert metrics["update"] == metrics["update/skipped"] == metrics["anchor/age"] == 0
    assert all(map(torch.equal, before, weights(trainer)))
    assert (
        f"{SKIPPED}{num_updates}, because the rewards of each group are equal"
        in capsys.readouterr().err
    )


def test_rewards_far_below_the_resolution_of_advantages_are_equal(tiny_config, mesh, capsys):
    (metrics,), trainer = run(tiny_config, mesh, scorer=Rewards(1e-20, 2e-20, 7e-20))
    assert metrics["update/without_signal"] == 1 and metrics["advantage/zero_groups"] == 2
    assert SKIPPED in capsys.readouterr().err


def test_equal_rewards_train_the_kl_to_an_anchor_that_differs(tiny_config, mesh, capsys):
    config = tiny_config.with_settings(kl_strategy="fixed", learning_rate=1e-2)
    scorer = Redness()
    trainer = Trainer(config, mesh, CPU, scorers={"test": scorer})
    trainer.iteration = 1
    trainer.run_iteration()  # moves the policy away from the anchor
    trainer.run.scorer.scorers["test"] = Rewards(0.7)
    before = weights(trainer)
    trainer.iteration = 2
    metrics = trainer.run_iteration()
    assert (
        metrics["update"] == 2
        and metrics["update/without_signal"] == 0
        and metrics["kl/position"] > 0
    )
    assert not all(map(torch.equal, before, weights(trainer)))
    assert (
        f"iteration 2: {KL_ALONE}1, because the rewards of each group are equal"
        in capsys.readouterr().err
    )


def test_a_control_run_trains_with_advantages_of_0(tiny_config, mesh, capsys):
    config = tiny_config.with_settings(ignore_rewards=True, **TWO_UPDATES)
    (metrics,), _ = run(config, mesh)
    assert (
        metrics["update"] == 2
        and metrics["update/without_signal"] == 0
        and metrics["advantage/zero_groups"] == 2
    )
    assert "are equal" not in capsys.readouterr().err


def test_in_an_iteration_the_velocity_kl_is_a_signal_once_the_policy_has_moved(tiny_config, mesh):
    """Only the rewards of the first update's group differ."""
    config = tiny_config.with_settings(kl_strategy="stepwise", **TWO_UPDATES)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    trainer.iteration = 1
    first, second = dict.fromkeys(r.prompt for r in trainer.run.source.choose(1).requests)
    # groups alternate: the second one is trained first
    for prompt, counts in ((second, (2, 0)), (first, (1, 1))):
        trainer = Trainer(config, mesh, CPU, scorers={"test": FirstGroupDiffers(prompt)})
        trainer.iteration = 1
        metrics = trainer.run_iteration()
        assert (metrics["update"], metrics["update/without_signal"]) == counts
