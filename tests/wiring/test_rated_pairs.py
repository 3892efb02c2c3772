"""What belongs to a given video stays with it: prompt, latents, and in a rated pair its weight and
which video is better.
"""

from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from hyvideo.data.video_files import ClipForm
from hyvideo.loading.video_latents import VideoLatents
from hyvideo.trainer import Trainer
from hyvideo.training.iteration import collect, sample
from tests.rated_pairs import DPO, PROMPTS, write_clip, write_pairs
from tests.shallow import SHALLOW
from tests.wiring.conftest import FILE_FPS

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
    monkeypatch.setattr(run.source, "examples", replace(run.source.examples, train=weighted))
    mean = fmean(pair.weight for pair in weighted)
    trained_on = set()
    for iteration in (1, 2):
        rollouts = collect(run, iteration).rollouts
        expected = [WEIGHTS[prompt] / mean for prompt in rollouts.prompts]
        assert rollouts.weights.tolist() == pytest.approx(expected)
        trained_on.update(rollouts.prompts)
    assert len(trained_on) > 1


def test_the_held_out_margin_is_positive_if_the_policy_is_better_at_the_winner(
    trainer, monkeypatch
):
    """A smaller error of the velocity of the winner means that it has become more likely. Each batch
    of pairs is compared with the errors of the base model at the same pairs.
    """
    objective, source = trainer.run.objective, trainer.run.source
    pairs = source.examples.all
    monkeypatch.setattr(source, "examples", replace(source.examples, held_out=pairs))
    batches = list(source.held_out())
    assert len(batches) == 2 < len(pairs)
    assert [pair for batch in batches for pair in batch.groups] == list(range(len(pairs)))

    def errors(better):
        def of(batch, *, of_base_model):
            # of the base model, other ones for each video
            found = [1.0 + index.group * (1 + index.member) for index in batch.indices]
            for row, index in enumerate(batch.indices):
                if not of_base_model and index.member == better:
                    found[row] -= 0.25
            return torch.tensor(found)[:, None].expand(-1, 4)

        return of

    found = []
    for better in (0, 1):
        objective._base_errors.clear()
        monkeypatch.setattr(objective, "errors", errors(better))
        found.append(objective.measure(batches, len(pairs)))
    # beta / 2 * 0.25
    assert [each["dpo/held_out_margin"] for each in found] == pytest.approx([2.5, -2.5])
    assert [each["dpo/held_out_accuracy"] for each in found] == [1.0, 0.0]


def test_stored_latents_are_those_of_one_video_one_form_and_one_vae(tmp_path):
    videos = [write_pairs(tmp_path / "rated").parent / f"0{side}.mp4" for side in "ab"]
    files = [
        VideoLatents(
            tmp_path / "run", videos, form=form, vae_weights="weights", vae_identity=vae
        ).files[video]
        for vae in ("one", "other")
        for form in (ClipForm(5, 16, 16, 8), ClipForm(5, 16, 16, 4))
        for video in videos
    ]
    assert len({*files}) == 8


def test_every_video_of_every_prompt_is_trained_on_once_per_epoch_at_the_size_of_the_rollouts(
    distinct, mesh, tmp_path
):
    """Also a second video of a prompt, and although the validation has another size."""
    config = distinct.with_settings(
        objective="sft",
        kl_strategy="none",
        kl_weight=0.0,
        nft_levels=2,
        num_generations=1,
        batch_size=2,
        gradient_accumulation_steps=1,
        cfg_scale=1.0,
        guidance_interval="",
    )
    size = config.sampling.size
    prompts = [PROMPTS[number] for number in (0, 1, 1, 2, 3)]
    rows = ["prompt,video"]
    for number, prompt in enumerate(prompts):
        # at the rate of the run, these have the frames of a rollout
        write_clip(tmp_path / f"{number}.mp4", number, (9, *size[1:]), fps=FILE_FPS)
        rows.append(f"{prompt},{number}.mp4")
    (tmp_path / "videos.csv").write_text("\n".join(rows))
    config = config.with_settings(videos_csv=[str(tmp_path / "videos.csv")])
    trainer = Trainer(config, mesh, CPU, scorers={})
    source = trainer.run.source
    latents = {
        example.videos[0]: source.latents.read(example.videos[0])
        for example in source.examples.train
    }
    shape = trainer.run.pipeline.latent_shape(*size)
    assert shape != trainer.run.pipeline.latent_shape(*config.validation_sampling.size)
    assert {tuple(each.shape) for each in latents.values()} == {shape}
    counts = Counter()
    for iteration in range(1, len(prompts) + 1):  # two epochs
        rollouts, _ = sample(trainer.run, iteration)
        for prompt, final in zip(rollouts.prompts, rollouts.trajectories.final):
            (video,) = [name for name, each in latents.items() if torch.equal(each, final)]
            assert prompt == prompts[int(video.stem)]
            counts[video.stem] += 1
    assert counts == dict.fromkeys("01234", 2)
