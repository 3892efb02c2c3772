"""The whole loop on random weights of the real classes: what GRPO relies on, and what a run leaves."""

import json
import math

import pytest
import torch

from hyvideo.plan import make_plan
from hyvideo.trainer import Trainer

CPU = torch.device("cpu")
TIMING = ("time/", "memory/")


class Redness:
    """Rewards red over blue; a reward that random weights can learn in seconds."""

    def score(self, videos, prompts, *, fps):
        values = [(video[:, 0].float() - video[:, 2].float()).mean().item() / 255 for video in videos]
        return [{"VQ": value, "MQ": value, "TA": value} for value in values]

    def check_prompts(self, prompts):
        pass

    def held_out(self, videos, prompts):
        return {}


class Forgetful(Redness):
    """Cannot score the first video of every batch."""

    def score(self, videos, prompts, *, fps):
        first, *others = super().score(videos, prompts, fps=fps)
        return [first | {"TA": math.nan}, *others]


def run(config, mesh, iterations=1, scorer=None):
    """Metrics of a few iterations of a new trainer, and the trainer."""
    trainer = Trainer(config, mesh, CPU, scorers={"test": scorer or Redness()})
    history = []
    for _ in range(iterations):
        trainer.iteration += 1
        history.append(trainer.run_iteration())
    return history, trainer


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.trained]


def without_times(line):
    return {name: value for name, value in line.items() if not name.startswith(TIMING)}


# --- what GRPO relies on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sde_type", ["sage_grpo", "flow_grpo", "dance_grpo", "cps"])
def test_the_first_ratio_of_fresh_rollouts_is_exactly_one(tiny_config, mesh, sde_type):
    (metrics,), _ = run(tiny_config.with_settings(sde_type=sde_type), mesh)
    assert metrics["policy/ratio_max_deviation"] == 0
    assert metrics["policy/ratio_mean"] == 1
    assert metrics["kl/velocity"] == 0


def test_ratios_leave_one_with_a_second_update_on_the_same_rollouts(tiny_config, mesh):
    config = tiny_config.with_settings(num_updates_per_rollout=2, learning_rate=1e-3)
    history, trainer = run(config, mesh)
    assert trainer.update_count == 2
    # The two updates train different groups: what one changes shows in the other.
    assert history[0]["policy/ratio_max_deviation"] > 0


@pytest.mark.parametrize("sde_type", ["sage_grpo", "cps"])
def test_the_reward_rises(tiny_config, mesh, sde_type):
    config = tiny_config.with_settings(
        sde_type=sde_type, batch_size=16, num_generations=8, mini_batch_size_per_update=16, learning_rate=2e-3
    )
    history, _ = run(config, mesh, iterations=14)
    rewards = [metrics["reward/mean"] for metrics in history]
    group_std = history[0]["reward/std"]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + group_std


def test_two_runs_of_one_seed_are_equal_bit_for_bit(tiny_config, mesh):
    first, _ = run(tiny_config, mesh, iterations=2)
    second, _ = run(tiny_config, mesh, iterations=2)
    assert [without_times(line) for line in first] == [without_times(line) for line in second]


def test_another_seed_is_another_run(tiny_config, mesh):
    first, _ = run(tiny_config, mesh)
    second, _ = run(tiny_config.with_settings(seed=7), mesh)
    assert first[0]["reward/mean"] != second[0]["reward/mean"]


def test_rollouts_do_not_depend_on_how_they_are_batched(tiny_config, mesh):
    whole, _ = run(tiny_config, mesh)
    parts, _ = run(tiny_config.with_settings(batch_size=4, gradient_accumulation_steps=2), mesh)
    for name in ("reward/mean", "reward/std", "policy/log_prob", "grad/norm"):
        assert parts[0][name] == pytest.approx(whole[0][name], rel=1e-3), name


def test_the_size_of_a_training_forward_does_not_change_the_gradient(tiny_config, mesh):
    whole, _ = run(tiny_config, mesh)
    parts, _ = run(tiny_config.with_settings(mini_batch_size_per_update=2), mesh)
    assert parts[0]["grad/norm"] == pytest.approx(whole[0]["grad/norm"], rel=1e-4)


# --- trust region --------------------------------------------------------------------------------------------------


def test_the_anchor_costs_no_forward_while_it_equals_the_policy(tiny_config, mesh):
    config = tiny_config.with_settings(update_ref_model_step=1)
    history, trainer = run(config, mesh, iterations=2)
    plan = make_plan(config)
    rollout_and_training = 4 + 3 * plan.trained_steps
    assert [line["cost/forwards"] for line in history] == [rollout_and_training] * 2
    assert all(line["kl/position"] == 0 for line in history)
    assert trainer.anchor.age == 0


def test_a_fixed_anchor_measures_the_distance_from_the_start(tiny_config, mesh):
    config = tiny_config.with_settings(use_moving_KL=False, learning_rate=1e-3)
    history, trainer = run(config, mesh, iterations=3)
    distances = [line["kl/position"] for line in history]
    assert distances[0] == 0 < distances[1] < distances[2]
    assert history[1]["cost/forwards"] == history[0]["cost/forwards"] + 3  # one per stochastic step
    assert trainer.anchor.age == 3


def test_both_ways_to_compute_the_anchor_train_the_same(tiny_config, mesh):
    config = tiny_config.with_settings(use_moving_KL=False, learning_rate=1e-3, kl_weight=1.0, kl_schedule="constant")
    early, first = run(config, mesh, iterations=2)
    late, second = run(config.with_settings(kl_compute_mode="training_phase"), mesh, iterations=2)
    assert early[1]["kl/position"] == pytest.approx(late[1]["kl/position"], rel=1e-5)
    assert early[1]["cost/forwards"] == late[1]["cost/forwards"]
    torch.testing.assert_close(weights(first), weights(second))


def test_a_strong_position_kl_holds_the_policy_back(tiny_config, mesh):
    free = tiny_config.with_settings(use_moving_KL=False, learning_rate=1e-3, kl_weight=0.0)
    held = free.with_settings(kl_weight=1e4, kl_schedule="constant")
    start = weights(Trainer(free, mesh, CPU, scorers={"test": Redness()}))

    def drift(config):
        _, trainer = run(config, mesh, iterations=4)
        return sum(((a - b) ** 2).sum() for a, b in zip(weights(trainer), start))

    assert drift(held) < drift(free)


@pytest.mark.parametrize("strategy", ["none", "fixed", "stepwise", "moving", "dual_moving", "dual_fixed"])
@pytest.mark.parametrize("kl_velocity", ["log_ratio", "gaussian"])
def test_every_strategy_trains(tiny_config, mesh, strategy, kl_velocity):
    kl = {"kl_weight": 0.0} if strategy == "none" else {"kl_strategy": strategy}
    history, trainer = run(tiny_config.with_settings(kl_velocity=kl_velocity, **kl), mesh, iterations=2)
    assert math.isfinite(history[1]["loss/total"]) and history[1]["grad/norm"] > 0
    assert (trainer.anchor is None) == (strategy in ("none", "stepwise"))


# --- missing rewards -----------------------------------------------------------------------------------------------


def test_a_rollout_without_reward_is_left_out_and_counted(tiny_config, mesh):
    (metrics,), _ = run(tiny_config, mesh, scorer=Forgetful())
    (full,), _ = run(tiny_config, mesh)
    assert metrics["reward/missing"] == 1
    assert math.isfinite(metrics["loss/policy"]) and metrics["grad/norm"] != full["grad/norm"]
    assert metrics["cost/forwards"] < full["cost/forwards"]


# --- what a run leaves ---------------------------------------------------------------------------------------------


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_what_the_layout_promises(tiny_config, mesh, tmp_path):
    config = tiny_config.with_settings(
        valid_video_csv="assets/miniature/prompts/smoke.csv",
        max_steps=2,
        save_interval=1,
        log_video_interval=2,
        log_num_videos=2,
        report_to=["tensorboard"],
    )
    trainer = Trainer(config, mesh, CPU)
    trainer.train()
    out = tmp_path / "run"
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
        "rollouts/000002/scores.json",
        "samples/000000/000.mp4",
    ):
        assert (out / name).exists(), name
    assert (out / "checkpoints/latest").read_text().strip() == "000002"
    entries = json.loads((out / "rollouts/000002/scores.json").read_text())
    assert len(entries) == 8 and {"prompt", "seed", "group", "file", "reward", "VQ", "missing"} <= entries[0].keys()
    assert [line["iteration"] for line in lines(out)] == [1, 2]
    assert "validation/frechet_distance" in lines(out)[1]
    assert trainer.validation.picture(2).is_file()


@pytest.mark.parametrize("strategy", ["dual_moving", "fixed"])
def test_a_resumed_run_is_the_unbroken_one(tiny_config, mesh, tmp_path, strategy):
    config = tiny_config.with_settings(
        kl_strategy=strategy, max_steps=4, save_interval=2, update_ref_model_step=3, learning_rate=1e-3
    )
    unbroken = Trainer(config, mesh, CPU)
    unbroken.train()
    expected = [without_times(line) for line in lines(tmp_path / "run")]

    broken = config.with_settings(output_dir=str(tmp_path / "broken"))
    Trainer(broken.with_settings(max_steps=2), mesh, CPU).train()
    resumed = Trainer(broken.with_settings(resume_from_checkpoint="latest"), mesh, CPU)
    assert resumed.iteration == 2
    resumed.train()
    assert [without_times(line) for line in lines(tmp_path / "broken")] == expected
    assert all(torch.equal(a, b) for a, b in zip(weights(unbroken), weights(resumed)))


def test_a_run_that_died_before_its_first_checkpoint_starts_over(tiny_config, mesh, tmp_path):
    config = tiny_config.with_settings(max_steps=1, resume_from_checkpoint="latest")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2}\n')
    Trainer(config, mesh, CPU).train()
    assert [line["iteration"] for line in lines(tmp_path / "run")] == [1]
    assert "reward/mean" in lines(tmp_path / "run")[0]
