"""Objective sft: training on given videos alone, and its gradient."""

import json
import shutil

import pytest
import torch

from hyvideo.checks.rules import check
from hyvideo.trainer import Trainer
from hyvideo.training.iteration import collect
from hyvideo.training.on_policy_check import OffPolicyError
from tests.forked import ROOT
from tests.rated_pairs import PROMPTS, write_pairs
from tests.shallow import SHALLOW
from tests.test_trainer import weights

CPU = torch.device("cpu")
SFT = {
    "objective": "sft",
    "kl_strategy": "none",
    "nft_levels": 2,
    "num_generations": 1,
    "learning_rate": 1e-3,
}


def write_videos(folder, letter="a"):
    write_pairs(folder)
    path = folder / "videos.csv"
    path.write_text(
        "prompt,video\n" + "".join(f"{p},{k}{letter}.mp4\n" for k, p in enumerate(PROMPTS))
    )
    return path


@pytest.fixture
def config(tiny_config, tmp_path):
    path = write_videos(tmp_path / "videos")
    return tiny_config.with_settings(
        **SFT, pretrained_model_root=SHALLOW, videos_csv=[str(path)], max_steps=1
    )


def test_it_trains_on_its_videos_alone_and_refuses_others_on_resume(config, mesh, tmp_path):
    check(config)
    trainer = Trainer(config, mesh, CPU)
    before = weights(trainer)
    trainer.train()
    assert not all(map(torch.equal, before, weights(trainer)))
    (line,) = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert line["loss/policy"] > 0 and "reward/mean" not in line
    # one forward and two backward passes for each level, and nothing to sample
    assert line["cost/forwards"] == pytest.approx(3 * config.objective.nft_levels)
    path = tmp_path / "videos" / "videos.csv"
    moved = path.with_name("moved.csv")
    shutil.copy(path, moved)
    Trainer(config.with_settings(max_steps=2, videos_csv=[str(moved)]), mesh, CPU)
    write_videos(tmp_path / "videos", letter="b")
    with pytest.raises(ValueError, match="videos_csv"):
        Trainer(config.with_settings(max_steps=2), mesh, CPU)


def test_the_gradient_is_that_of_the_flow_matching_loss_and_the_kl_to_the_base_model(config, mesh):
    """Gradient of mean |v - (e - x)|^2 + c |v - v_base|^2, computed here from the forward passes."""
    config = config.with_settings(kl_strategy="fixed", kl_weight=0.5, max_grad_norm=1e9)
    trainer = Trainer(config, mesh, CPU)
    run = trainer.run
    for trainer.iteration in (1, 2):  # in the second, the policy is not the base model any more
        trainer.run_iteration()
    objective, policy = run.objective, run.policy
    collected = collect(run, 3)
    rollouts = collected.rollouts
    rows = list(range(len(rollouts)))
    assert len(rows) == config.rollout.batch_size * config.rollout.gradient_accumulation_steps

    def gradient(loss):
        policy.optimizers.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten().clone() for p in policy.parameters])

    def velocity(column):
        levels = rollouts.trained_steps[:, column].view(-1, 1, 1, 1, 1).float()
        noise = torch.stack(
            [objective.noise.for_renoising(3, index, column) for index in rollouts.indices]
        )
        final = rollouts.trajectories.final
        noised = (1 - levels) * final + levels * noise
        times = 1000 * rollouts.trained_steps[:, column]
        return run.pipeline.velocity(noised, times, rollouts.conditions), noise - final

    with torch.no_grad(), policy.anchor.swapped_in():
        base = [velocity(column)[0] for column in rollouts.columns]
    expected = 0
    for column in rollouts.columns:
        found, target = velocity(column)
        loss = ((found - target) ** 2 + 0.5 * (found - base[column]) ** 2).flatten(1).mean(1)
        expected = expected + loss.sum()
    of_equation = gradient(expected)
    own = sum(
        objective.terms(rollouts, collected.reference, rows, column, kl_coefficient=0.5).loss.sum()
        for column in rollouts.columns
    )
    torch.testing.assert_close(gradient(own), of_equation, rtol=1e-4, atol=1e-6)


def test_the_folder_of_a_study_stands_for_its_file(config, tmp_path):
    (tmp_path / "empty").mkdir()
    folder = config.with_settings(videos_csv=[str(tmp_path / "videos")]).objective
    assert folder.read_videos(0) == config.objective.read_videos(0)
    with pytest.raises(ValueError, match="videos_csv: a folder must have videos.csv"):
        check(config.with_settings(videos_csv=[str(tmp_path / "empty")]))


def test_a_video_is_a_group_and_guidance_is_refused(config):
    check(config.with_settings(batch_size=3))
    with pytest.raises(ValueError, match="num_generations"):
        check(config.with_settings(num_generations=2, batch_size=4))
    with pytest.raises(ValueError, match="cfg_scale"):
        check(config.with_settings(cfg_scale=3.0))


def test_latents_of_another_model_stop_the_first_update(config, mesh):
    config = config.with_settings(
        pretrained_model_root=str(ROOT / "assets/miniature"), random_weights=False
    )
    trainer = Trainer(config, mesh, CPU)
    shape = trainer.run.pipeline.latent_shape(*config.sampling.size)
    trainer.run.source.latents.read = lambda video: 30 * torch.ones(shape)
    trainer.iteration = 1
    with pytest.raises(OffPolicyError, match="not those of this model's VAE"):
        trainer.run_iteration()
