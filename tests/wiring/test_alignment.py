"""Prompts, videos and rewards stay together, over several batches and for every rank of a layout.

The ranks of a layout are simulated one after the other: what a rank samples, decodes and scores
depends on its place in the mesh, and needs no communication.
"""

import pytest
import torch

from hyvideo.distributed.mesh import Mesh
from hyvideo.rewards.rewards import Scorer
from hyvideo.trainer import Trainer
from hyvideo.training.iteration import sample
from tests.shallow import SHALLOW
from tests.training.test_reward_gradient import ALONE, Contrast

CPU = torch.device("cpu")
NUM_ROLLOUTS, GROUP = 12, 3
# Ranks, ranks that share a video, rollouts of a batch, and batches: 12 rollouts each.
WHOLE = (1, 1, NUM_ROLLOUTS, 1)
LAYOUTS = [(1, 1, 6, 2), (2, 1, 3, 2), (2, 2, 6, 2), (4, 2, 3, 2), (3, 3, 12, 1)]


class Labels(Scorer):
    """Returns a number of the prompt and one of the pixels in place of a judgement."""

    dimensions = ("VQ", "MQ")

    def score(self, videos, prompts, *, fps):
        return [
            {"VQ": float(number(prompt)), "MQ": video.double().mean().item()}
            for video, prompt in zip(videos, prompts, strict=True)
        ]


def number(prompt):
    return sum(prompt.encode())


def labels(reward):
    return reward.scores["VQ"], reward.scores["MQ"]


def ranks(layout):
    world_size, sp_size, _, _ = layout
    return [Mesh(rank, world_size, sp_size) for rank in range(world_size)]


@pytest.fixture
def trainer(distinct, mesh):
    """A trainer whose rows have the same bits in every batch."""
    config = distinct.with_settings(
        num_generations=GROUP,
        grpo_sampling_steps=2,
        cfg_scale=1.0,
        guidance_interval="",
        batched_forward=False,
        decode_batch_size=1,
        validation_steps=1,
        validation_num_frames=5,
        validation_height=16,
        validation_width=8,
    )
    return Trainer(config, mesh, CPU, scorers={"labels": Labels()})


def scored_rollouts(trainer, monkeypatch, layout):
    """Return the prompt, the labels and the mean of the latents of each rollout by its number, over
    all ranks of a layout.
    """
    _, _, batch_size, num_batches = layout
    collector, found = trainer.run.source, {}
    config = trainer.config.with_settings(
        batch_size=batch_size, gradient_accumulation_steps=num_batches
    )
    monkeypatch.setattr(collector, "config", config)
    for mesh in ranks(layout):
        monkeypatch.setattr(collector, "mesh", mesh)
        rollouts, pending = sample(trainer.run, 1)
        for row, reward in trainer.run.rewards.wait(pending).items():
            rollout = rollouts.indices[row].number(config.rollout.num_generations)
            assert rollout not in found, "two ranks score a rollout"
            latents = rollouts.trajectories.final[row : row + 1]
            found[rollout] = rollouts.prompts[row], labels(reward), latents.double().mean().item()
            if layout == WHOLE:  # others must have the same labels and latents
                (video,) = collector.pipeline.decode(latents)
                assert video.double().mean().item() == reward.scores["MQ"]
    return found


def test_each_rollout_is_scored_once_with_its_own_prompt_and_video(trainer, monkeypatch):
    collector = trainer.run.source
    order = collector.order.indices(1)
    prompts = [
        collector.requests[order[rollout // GROUP]].prompt for rollout in range(NUM_ROLLOUTS)
    ]
    assert len({number(prompt) for prompt in prompts}) == NUM_ROLLOUTS // GROUP
    expected = scored_rollouts(trainer, monkeypatch, WHOLE)
    for number_of in (1, 2):
        assert len({found[number_of] for found in expected.values()}) == NUM_ROLLOUTS
    for layout in LAYOUTS:
        found = scored_rollouts(trainer, monkeypatch, layout)
        assert found == expected, layout
        for rollout, prompt in enumerate(prompts):
            assert found[rollout][0] == prompt and found[rollout][1][0] == number(prompt), layout


def test_rewards_that_are_requested_between_stages_are_those_of_the_same_rollouts(
    trainer, monkeypatch
):
    at_once = scored_rollouts(trainer, monkeypatch, (1, 1, 3, 4))
    trainer.config = trainer.config.with_settings(offload=["reward"])
    assert scored_rollouts(trainer, monkeypatch, (1, 1, 3, 4)) == at_once


def test_advantages_follow_the_rewards_of_their_own_rollouts(trainer, monkeypatch):
    """In a group, whose rollouts have one prompt, the better video has the positive advantage."""
    collector = trainer.run.source
    config = trainer.config.with_settings(batch_size=3, gradient_accumulation_steps=4)
    monkeypatch.setattr(collector, "config", config)
    rollouts, pending = sample(trainer.run, 1)
    rewards = trainer.run.rewards.wait(pending)
    advantages, _ = trainer.run.rewards.advantages(rollouts.indices, rewards)
    for first in range(0, NUM_ROLLOUTS, GROUP):
        rows = range(first, first + GROUP)
        by_reward = sorted(rows, key=lambda row: rewards[row].total)
        assert by_reward == sorted(rows, key=lambda row: advantages[row])


def scored_videos(trainer, monkeypatch, layout):
    """Return the labels of each video of the validation by row, over all ranks of a layout."""
    world_size, sp_size, batch_size, _ = layout
    validation, found = trainer.validation, {}
    settings = trainer.config.with_settings(validation_batch_size=batch_size).validation
    monkeypatch.setattr(validation, "settings", settings)
    for mesh in ranks(layout):
        monkeypatch.setattr(validation, "mesh", mesh)
        for videos in validation.videos(validation.rows()):
            for row, reward in validation._rewards(videos).items():
                # the last row is repeated where replicas would have different numbers of videos
                assert found.setdefault(row, labels(reward)) == labels(reward)
    return found


def test_each_video_of_a_validation_has_its_own_number_prompt_and_noise(trainer, monkeypatch):
    validation = trainer.validation
    expected = scored_videos(trainer, monkeypatch, (1, 1, len(validation.prompts), 1))
    assert [expected[row][0] for row in sorted(expected)] == [*map(number, validation.prompts)]
    assert len(set(expected.values())) == len(validation.prompts) > len(set(validation.prompts))
    for layout in LAYOUTS:
        assert scored_videos(trainer, monkeypatch, layout) == expected, layout


def test_scores_with_gradient_have_the_weights_of_their_own_scorer(tiny_config, mesh):
    """Also if two scorers have the same dimensions."""
    weights = '{"a": {"VQ": 1, "MQ": 0.5}, "b": {"MQ": 3}}'
    config = tiny_config.with_settings(
        **ALONE | {"pretrained_model_root": SHALLOW, "reward_weights": weights}
    )
    trainer = Trainer(config, mesh, CPU, scorers={"a": Contrast(), "b": Contrast()})
    levels = torch.randint(0, 256, (2, *config.sampling.size[:1], 3, 16, 16)).float()
    prompts = ["a red circle moves up", "a blue circle moves down"]
    found = trainer.run.update.reward_term.gradient.reward_of_levels(
        levels.clone().requires_grad_(), prompts
    )
    rewards = trainer.run.rewards.scorer.measure([*levels.byte()], prompts, fps=8)
    assert found.tolist() == pytest.approx([reward.total for reward in rewards])
    assert min(found.tolist()) > 0
