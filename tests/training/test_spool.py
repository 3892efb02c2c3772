"""Finished rollouts come back as they were, or not at all."""

import math

import pytest
import torch

from hyvideo.models.reward_models.rewards import Reward
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Trajectories
from hyvideo.training.spool import Spool

CPU = torch.device("cpu")
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
ROLLOUT = Trajectories(torch.randn(2, 4, 3), torch.randn(2, 3, 3), torch.randn(2, 3))


@pytest.fixture
def spool(tiny_config, mesh):
    def make(iteration=1, weights=WEIGHTS, **settings):
        return Spool(tiny_config.with_settings(**settings), mesh, iteration, weights, CPU, {})

    return make


def test_rollouts_and_rewards_come_back_bit_for_bit(spool):
    rewards = [Reward(0.1 + 0.2, {"VQ": 1 / 3, "TA": math.nan}, None)]
    spool().keep_rollout(0, ROLLOUT)
    spool().keep_rewards(0, rewards)
    again = spool(save_interval=7, max_steps=9)  # what a rollout does not depend on
    for name in ("latents", "means", "log_probs"):
        assert torch.equal(getattr(again.rollout(0), name), getattr(ROLLOUT, name))
    (reward,) = again.rewards(0)
    assert reward.total == 0.1 + 0.2 and reward.scores["VQ"] == 1 / 3 and math.isnan(reward.scores["TA"])
    assert again.rollout(1) is None and again.rewards(1) is None


def test_another_policy_setting_or_iteration_does_not_find_them(spool):
    spool().keep_rollout(0, ROLLOUT)
    moved = WEIGHTS | {"a": WEIGHTS["a"] * (1 + 1e-7)}
    assert not torch.equal(moved["a"], WEIGHTS["a"])
    for other in (spool(weights=moved), spool(eta=0.71), spool(iteration=2)):
        assert other.rollout(0) is None
    assert spool().rollout(0) is not None


@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_file_is_made_again(spool, cut):
    spool().keep_rollout(0, ROLLOUT)
    (path,) = spool().folder.iterdir()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content[:-9] if cut else content)
    assert spool().rollout(0) is None


def test_a_missing_reward_is_asked_for_again(spool):
    spool().keep_rewards(0, [Reward(1.0, {}, None), Reward(math.nan, {}, "out of reach")])
    assert spool().rewards(0) is None


def test_a_trained_round_is_forgotten_and_a_later_one_is_not(spool):
    for iteration in (1, 2, 3):
        spool(iteration).keep_rollout(0, ROLLOUT)
    spool(2, spool_rounds=2).forget()
    assert [path.name[:6] for path in sorted(spool().root.iterdir())] == ["000002", "000003"]
    spool(2).forget()
    assert [path.name[:6] for path in spool().root.iterdir()] == ["000003"]


def test_without_a_spool_nothing_is_kept(spool):
    none = spool(spool_rounds=0)
    none.keep_rollout(0, ROLLOUT)
    none.keep_rewards(0, [])
    none.forget()
    assert not none.root.exists() and none.rollout(0) is None and none.rewards(0) is None


def test_what_cannot_be_written_is_told_and_is_no_end(spool, capsys):
    spool().root.parent.mkdir()
    spool().root.write_text("a file where the folder should be")
    spool().keep_rollout(0, ROLLOUT)
    spool().keep_rewards(0, [Reward(1.0, {}, None)])
    assert capsys.readouterr().err.count("ROLLOUTS NOT SPOOLED") == 2
