"""Sampling of rollouts: shared noise, counted forward passes, and scoring between stages."""

import torch

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
        indices = collector.choose(1).indices
        conditions = collector.encoder(collector.choose(1).requests[: len(indices)])
        latents = collector.sample(1, collector.schedule_of(1), indices, conditions).latents
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
    assert collector.schedule_of(1) == other and given == [[1]]
