"""Sampling of rollouts: shared noise, counted forward passes, and scoring between stages."""

import pytest
import torch

from hyvideo.rewards.rewards import Scorer
from hyvideo.settings.iteration_plan import make_plan
from hyvideo.trainer import Trainer

CPU = torch.device("cpu")


def test_the_rollouts_of_a_group_share_their_initial_noise_on_request(tiny_config, mesh):
    for is_shared, count in ((True, 2), (False, 8)):
        settings = {
            "use_same_noise": is_shared,
            "num_generations": 4,
            "sde_window": "fixed:2:2",
            "grpo_sampling_steps": 6,
        }
        trainer = Trainer(tiny_config.with_settings(**settings), mesh, CPU)
        collector = trainer.run.source
        indices = collector.indices()
        conditions = collector.encoder(collector.requests_of(1, indices))
        latents = collector.sample(
            1, collector.schedule_of(trainer.run.objective, 1), indices, conditions
        ).latents
        distinct = [
            len({tuple(row.flatten().tolist()) for row in latents[:, step]}) for step in range(7)
        ]
        assert distinct == [count] * 3 + [8] * 4  # the third step is the first with noise


def test_a_window_is_applied_to_the_schedule_of_the_objective(tiny_config, mesh, monkeypatch):
    config = tiny_config.with_settings(sde_window="fixed:1:1", grpo_sampling_steps=3)
    trainer = Trainer(config, mesh, CPU)
    collector = trainer.run.source
    other = collector.schedule.with_noise_only_at([1])
    assert other != collector.schedule
    monkeypatch.setattr(trainer.run.objective, "schedule", lambda schedule, iteration: other)
    given = []
    monkeypatch.setattr(
        type(collector.window), "steps", lambda self, steps, *rest: given.append(steps) or steps
    )
    assert collector.schedule_of(trainer.run.objective, 1) == other and given == [[1]]


def test_the_plan_counts_the_forward_passes_of_an_iteration(tiny_config, mesh):
    """The first iteration needs no forward passes of the anchor, which equals the policy."""
    config = tiny_config.with_settings(
        batch_size=2, gradient_accumulation_steps=4, kl_strategy="none", kl_weight=0.0
    )
    trainer = Trainer(config, mesh, CPU)
    trainer.iteration += 1
    steps = config.rollout.grpo_sampling_steps
    assert (
        trainer.run_iteration()["cost/forwards"] == steps + 3 * make_plan(config).num_trained_steps
    )


class Movable(Scorer):
    """Scores red minus blue, and adds its events to a list."""

    def __init__(self, events):
        self.events = events

    def move_to(self, device):
        self.events.append(device or "to its device")

    def score(self, videos, prompts, *, fps):
        self.events.append("score")
        values = [
            (video[:, 0].float() - video[:, 2].float()).mean().item() / 255 for video in videos
        ]
        return [{"VQ": value, "MQ": value, "TA": value} for value in values]


@pytest.mark.slow
def test_scoring_between_stages_gives_the_same_metrics_and_overlaps_with_no_stage(
    tiny_config, mesh
):
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
                {
                    key: value
                    for key, value in line.items()
                    if not key.startswith(("time/", "memory/", "perf/"))
                }
            )
        runs.append(
            (lines, [parameter.detach().clone() for parameter in trainer.run.policy.parameters])
        )
    (asynchronous, weights), (between, same_weights) = runs
    assert asynchronous == between
    assert all(torch.equal(*pair) for pair in zip(weights, same_weights))
    first, last = events.index("to its device"), len(events) - events[::-1].index("cpu") - 1
    assert {"rollout", "decode"} <= {*events[:first]} and {"anchor", "update"} <= {*events[last:]}
    assert {*events[first:last]} <= {"to its device", "score", "reward"} and events.count(
        "score"
    ) == 2
