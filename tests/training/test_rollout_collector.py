"""Sampling of rollouts: steps that a group has in common are computed once."""

import pytest
import torch

from hyvideo.config.run_plan import make_plan, shared_fraction, steps_before_noise
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.reward_models.rewards import Scorer
from hyvideo.trainer import Trainer
from hyvideo.training.rollout_batch import indices_of_replica

CPU = torch.device("cpu")
SHARED = {"use_same_noise": True, "sde_window": "fixed:2:2", "grpo_sampling_steps": 6, "num_generations": 4}


def count_samples(trainer):
    """Return a list that receives the number of samples of each transformer call from now on."""
    sizes = []
    trainer.pipeline.transformer.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    return sizes


@pytest.mark.parametrize("batched, calls", [("false", [1] * (2 * 2 + 4 * 8)), ("true", [2] * 2 + [8] * 4)])
def test_steps_before_the_first_noise_are_computed_once_for_a_group(tiny_config, mesh, monkeypatch, batched, calls):
    trainer = Trainer(tiny_config.with_settings(batch_size=8, batched_forward=batched, **SHARED), mesh, CPU)
    collector, sizes = trainer.collector, count_samples(trainer)
    collector.noisy_steps(1)
    indices = collector.indices()
    conditions, mean_steps = trainer.encoder(collector.requests_of(1, indices)), torch.tensor([[3, 2]] * 8)
    shared = collector.sample(1, indices, conditions, mean_steps=mean_steps)
    assert sizes == calls
    monkeypatch.setattr(type(trainer.pipeline), "num_shared_steps", 0)
    separate = collector.sample(1, indices, conditions, mean_steps=mean_steps)
    assert len({tuple(row.flatten().tolist()) for row in shared.final}) == 8
    tolerance = {"rtol": 0, "atol": 0} if batched == "false" else {"rtol": 1e-5, "atol": 1e-5}
    for first, second in ((shared.latents, separate.latents), (shared.log_probs, separate.log_probs)):
        torch.testing.assert_close(first, second, **tolerance)
    torch.testing.assert_close(shared.means, separate.means, **tolerance)


def test_rollouts_with_separate_noise_share_no_steps(tiny_config, mesh):
    trainer = Trainer(tiny_config.with_settings(**SHARED | {"use_same_noise": False}), mesh, CPU)
    sizes, indices = count_samples(trainer), trainer.collector.indices()
    trainer.collector.sample(1, indices, trainer.encoder(trainer.collector.requests_of(1, indices)))
    assert sizes == [8] * 6 and shared_fraction(trainer.config.rollout) == 0


@pytest.mark.parametrize("batch_size, saved", [(8, 2 * 3 / 4), (2, 2 * 1 / 2)])  # two groups, and half of one
def test_the_plan_counts_the_forward_passes_of_an_iteration(tiny_config, mesh, batch_size, saved):
    """The first iteration needs no forward passes of the anchor, which equals the policy."""
    changes = {"batch_size": batch_size, "gradient_accumulation_steps": 8 // batch_size, "kl_strategy": "none"}
    config = tiny_config.with_settings(**SHARED | changes, kl_weight=0.0)
    assert shared_fraction(config.rollout) * steps_before_noise(config.rollout) == saved
    trainer = Trainer(config, mesh, CPU)
    trainer.iteration += 1
    assert trainer.run_iteration()["cost/forwards"] == 6 - saved + 3 * make_plan(config).num_trained_steps


@pytest.mark.parametrize(
    "batch_size, group_size, num_replicas", [(8, 4, 2), (2, 6, 3), (3, 6, 4), (1, 4, 8), (6, 6, 2)]
)
def test_every_batch_of_every_replica_has_the_same_number_of_groups(tiny_config, batch_size, group_size, num_replicas):
    """All ranks then make the same number of calls, and save the fraction that the plan predicts."""
    changes = {"batch_size": batch_size, "num_generations": group_size, "use_same_noise": True}
    settings = tiny_config.with_settings(**changes).rollout
    meshes = [Mesh(rank, num_replicas, 1) for rank in range(num_replicas)]
    batches = [indices_of_replica(settings, mesh, batch) for mesh in meshes for batch in range(3)]
    (count,) = {len({index.group for index in batch}) for batch in batches}
    assert count == pytest.approx(batch_size * (1 - shared_fraction(settings)))


def test_a_moving_window_saves_the_mean_over_its_positions(tiny_config):
    """Five steps are stochastic; at shift 9 and 40 steps the first one is deterministic, with or without a window."""

    def before(window, **changes):
        return steps_before_noise(tiny_config.with_settings(**SHARED | {"sde_window": window} | changes).rollout)

    assert [before(text) for text in ("", "fixed:3:1", "random:2", "sliding:2:2")] == [0, 3, 1.5, 1]
    assert [before(text, grpo_sampling_steps=40, shift=9.0) for text in ("", "fixed:3:1")] == [1, 4]


class Movable(Scorer):
    """Scores red minus blue, and adds its events to a list."""

    def __init__(self, events):
        self.events = events

    def move_to(self, device):
        self.events.append(device or "to its device")

    def score(self, videos, prompts, *, fps):
        self.events.append("score")
        values = [(video[:, 0].float() - video[:, 2].float()).mean().item() / 255 for video in videos]
        return [{"VQ": value, "MQ": value, "TA": value} for value in values]


def test_scoring_between_stages_gives_the_same_metrics_and_overlaps_with_no_stage(tiny_config, mesh):
    batches = {"batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    runs = []
    for settings in ({}, {"reward_offload": True, "score_between_stages": True}):
        events = []
        trainer = Trainer(
            tiny_config.with_settings(**batches, **settings),
            mesh,
            CPU,
            scorers={"test": Movable(events)},
            on_stage=lambda stage, iteration, events=events: events.append(stage.split(",")[0]),
        )
        lines = []
        for iteration in (1, 2, 3):
            trainer.iteration = iteration
            events.clear()
            line = trainer.run_iteration()
            lines.append(
                {key: value for key, value in line.items() if not key.startswith(("time/", "memory/", "perf/"))}
            )
        runs.append((lines, [parameter.detach().clone() for parameter in trainer.policy.parameters]))
    (asynchronous, weights), (between, same_weights) = runs
    assert asynchronous == between
    assert all(torch.equal(*pair) for pair in zip(weights, same_weights))
    first, last = events.index("to its device"), len(events) - events[::-1].index("cpu") - 1
    assert {"rollout", "decode"} <= {*events[:first]} and {"anchor", "update"} <= {*events[last:]}
    assert {*events[first:last]} <= {"to its device", "score", "reward"} and events.count("score") == 2
