"""What belongs to a rated pair stays with it: its weight, its latents, and which video is better."""

from dataclasses import replace
from statistics import fmean

import pytest
import torch

from hyvideo.trainer import Trainer
from hyvideo.training.video_latents import VideoLatents
from tests.rated_pairs import DPO, PROMPTS, write_pairs
from tests.shallow import SHALLOW

CPU = torch.device("cpu")
WEIGHTS = dict(zip(PROMPTS, (1.0, 4.0, 9.0, 16.0)))


@pytest.fixture
def trainer(tiny_config, mesh, tmp_path):
    pairs = str(write_pairs(tmp_path / "rated"))
    return Trainer(
        tiny_config.with_settings(**DPO, pretrained_model_root=SHALLOW, pairs_csv=[pairs]),
        mesh,
        CPU,
    )


def test_each_pair_has_its_own_weight_relative_to_the_mean(trainer, monkeypatch):
    run = trainer.run
    weighted = [
        replace(pair, weight=WEIGHTS[pair.request.prompt]) for pair in run.source.examples.train
    ]
    monkeypatch.setitem(vars(run.inputs), "videos", replace(run.inputs.videos, train=weighted))
    mean = fmean(pair.weight for pair in weighted)
    trained_on = set()
    for iteration in (1, 2):
        rollouts = run.objective.collect(run, iteration).rollouts
        expected = [WEIGHTS[prompt] / mean for prompt in rollouts.prompts]
        assert rollouts.weights.tolist() == pytest.approx(expected)
        trained_on.update(rollouts.prompts)
    assert len(trained_on) > 1


def test_the_held_out_margin_is_positive_if_the_policy_is_better_at_the_winner(
    trainer, monkeypatch
):
    """A smaller error of the velocity of the winner means that it has become more likely."""
    objective = trainer.run.objective

    def errors(better):
        def of(batch, *, of_base_model):
            change = [
                0.0 if of_base_model or index.member != better else -0.25 for index in batch.indices
            ]
            return 1 + torch.tensor(change)[:, None].expand(-1, 4)

        return of

    found = []
    for better in (0, 1):
        objective._base_errors.clear()
        monkeypatch.setattr(objective, "errors", errors(better))
        found.append(objective.measure(trainer.run))
    # beta / 2 * 0.25
    assert [each["dpo/held_out_margin"] for each in found] == pytest.approx([2.5, -2.5])
    assert [each["dpo/held_out_accuracy"] for each in found] == [1.0, 0.0]


def test_stored_latents_are_those_of_one_video_and_one_vae(tmp_path):
    videos = [write_pairs(tmp_path / "rated").parent / f"0{side}.mp4" for side in "ab"]
    files = [
        VideoLatents(tmp_path / "run", videos, vae_identity=vae).files[video]
        for vae in ("one", "other")
        for video in videos
    ]
    assert len({*files}) == 4
