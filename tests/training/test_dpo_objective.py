"""Training with objective dpo: pairs in place of rollouts, the equation, resume, and held-out
answers.
"""

import pytest
import torch
import torch.nn.functional as F

from hyvideo.checks.rules import check
from hyvideo.data.video_files import ClipForm
from hyvideo.data.videos import at_original_size, read_video
from hyvideo.loading.video_latents import VideoLatents, write_latents
from hyvideo.models.decoding import encode
from hyvideo.models.loading import load_vae
from hyvideo.settings.command_line import load_config
from hyvideo.settings.config import Config
from hyvideo.trainer import Trainer
from hyvideo.training.iteration import collect
from hyvideo.training.on_policy_check import OffPolicyError
from tests.forked import ROOT
from tests.rated_pairs import DPO, PROMPTS, write_clip, write_pairs
from tests.shallow import SHALLOW

CPU = torch.device("cpu")
SETTINGS = DPO | {"pretrained_model_root": SHALLOW}


@pytest.fixture(scope="module")
def rated(tmp_path_factory):
    """A pairs CSV whose videos are encoded already, in the folder that runs look for them."""
    return write_pairs(tmp_path_factory.mktemp("rated"))


@pytest.fixture
def config(tiny_config, rated) -> Config:
    return tiny_config.with_settings(**SETTINGS, pairs_csv=[str(rated)])


def collected(trainer, iteration=1):
    trainer.iteration = iteration
    return collect(trainer.run, iteration).rollouts


def test_both_videos_of_a_pair_share_noise_level_noise_and_prompt(config, mesh):
    trainer = Trainer(config, mesh, CPU)
    rollouts = collected(trainer)
    assert [(index.group, index.member) for index in rollouts.indices] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    levels = rollouts.trained_steps
    assert torch.equal(levels[0::2], levels[1::2]) and len(levels.unique()) == 4
    noise = [trainer.run.objective.noise_of(rollouts, row, 0) for row in range(4)]
    assert torch.equal(noise[0], noise[1]) and not torch.equal(noise[0], noise[2])
    assert rollouts.prompts[0] == rollouts.prompts[1] != rollouts.prompts[2]
    latents = rollouts.trajectories.final
    assert latents.shape == (4, *trainer.run.pipeline.latent_shape(*config.sampling.size))
    pair = next(
        p for p in trainer.run.source.examples.train if p.request.prompt == rollouts.prompts[0]
    )
    for row, video in enumerate(pair.videos):
        pixels = at_original_size(read_video(video)[0], 16, 16)
        torch.testing.assert_close(encode(trainer.run.pipeline.vae, [pixels])[0], latents[row])


@pytest.mark.parametrize("rows_per_pass", [4, 1])
def test_the_gradient_equals_the_equation(config, mesh, rows_per_pass):
    """Of the second iteration, in which the policy has left the base model; one pair has three
    times the weight.
    """
    settings = {
        "mini_batch_size_per_update": rows_per_pass,
        "max_grad_norm": 1e9,
        "gate_interval": 0,
    }
    trainer = Trainer(config.with_settings(**settings), mesh, CPU)
    assert trainer.run.objective.has_whole_pairs == (rows_per_pass == 4)
    trainer.iteration = 1
    trainer.run_iteration()
    rollouts = collected(trainer, 2)
    rollouts.weights[:2] = 1.5
    rollouts.weights[2:] = 0.5

    pipeline, levels = trainer.run.pipeline, rollouts.trained_steps
    final = rollouts.trajectories.latents[:, -1]
    inputs = []
    for column in rollouts.columns:
        noise = torch.stack(
            [trainer.run.objective.noise_of(rollouts, row, column) for row in range(4)]
        )
        noised = torch.stack(
            [(1 - s) * x + s * e for s, x, e in zip(levels[:, column], final, noise)]
        )
        times = [(1000.0 * level, None) for level in levels[:, column].tolist()]
        with trainer.run.policy.anchor.swapped_in(), torch.no_grad():
            base = pipeline._forward(noised, times, rollouts.conditions)
        inputs.append((noised, times, noise - final, base))
    total = 0.0
    for noised, times, target, base in inputs:
        velocity = pipeline._forward(noised, times, rollouts.conditions)
        change = [
            (velocity[k] - target[k]).square().mean() - (base[k] - target[k]).square().mean()
            for k in range(4)
        ]
        for pair, weight in enumerate((1.5, 0.5)):
            z = -DPO["dpo_beta"] / 2 * (change[2 * pair] - change[2 * pair + 1])
            total = total - weight * F.logsigmoid(z) / 4  # mean over two pairs and two levels
        total = total + DPO["kl_weight"] * (velocity - base).square().mean() / 2
    expected = torch.autograd.grad(total, trainer.run.policy.parameters)

    reference = trainer.run.objective.prepare(rollouts)
    found = []
    step = trainer.run.policy.optimizers.step
    trainer.run.policy.optimizers.step = lambda lr: (
        found.extend(parameter.grad.clone() for parameter in trainer.run.policy.parameters),
        step(lr),
    )
    metrics = trainer.run.update(rollouts, reference, 2)
    assert metrics["loss/total"] == pytest.approx(total.item(), rel=1e-5)
    assert metrics["dpo/margin"] != 0
    largest = max(gradient.abs().max() for gradient in expected)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5 * largest.item())


@pytest.mark.parametrize("learning_rate, warnings", [(1e-3, 0), (1e-30, 1)])
def test_pairs_without_a_contrast_after_an_update_are_reported_once(
    config, mesh, capsys, learning_rate, warnings
):
    """A rate of 1e-30 changes no weight in float32."""
    trainer = Trainer(config.with_settings(learning_rate=learning_rate), mesh, CPU)
    found = [metrics_of(trainer, iteration)["dpo/contrast"] for iteration in (1, 2, 3)]
    assert found[0] == 0.0 and (found[2] > 0) == (not warnings)
    assert capsys.readouterr().err.count("no contrast") == warnings


def metrics_of(trainer, iteration):
    rollouts = collected(trainer, iteration)
    return trainer.run.update(rollouts, trainer.run.objective.prepare(rollouts), iteration)


@pytest.fixture
def rated_videos(tmp_path):
    """Return three videos, and a function that returns their latents, encoded where none are
    stored.
    """
    folder = write_pairs(tmp_path / "rated").parent
    videos = [folder / "0a.mp4", folder / "0b.mp4", folder / "1a.mp4"]
    vae = load_vae(ROOT / "assets/miniature", dtype=torch.float32, device=CPU)

    def prepare(mesh, vae_identity="a"):
        latents = VideoLatents(
            tmp_path / "run",
            videos,
            form=ClipForm(5, 16, 16, 8),
            vae_weights="weights",
            vae_identity=vae_identity,
        )
        latents.encode(vae, mesh)
        return latents

    return videos, prepare


def test_videos_are_encoded_once_for_each_vae(rated_videos, mesh, monkeypatch):
    videos, prepare = rated_videos
    encoded = []
    monkeypatch.setattr(
        "hyvideo.loading.video_latents.encode",
        lambda vae, clips: (encoded.append(len(clips)), encode(vae, clips))[1],
    )
    given = torch.ones(16, 2, 2, 2)
    write_latents(videos[2], given, vae_weights="weights")
    first = prepare(mesh)
    assert len(encoded) == 2 and torch.equal(first.read(videos[2]), given)
    again = prepare(mesh)
    assert len(encoded) == 2
    assert all(torch.equal(again.read(video), first.read(video)) for video in videos)
    other = prepare(mesh, vae_identity="b")
    assert len(encoded) == 4 and other.files[videos[0]] != first.files[videos[0]]


def test_a_replaced_video_is_encoded_again_and_changes_the_contents(rated_videos, mesh):
    videos, prepare = rated_videos
    first = prepare(mesh)
    write_clip(videos[1], seed=99)
    again = prepare(mesh)
    assert again.contents != first.contents and prepare(mesh).contents == again.contents
    assert [again.files[video] == first.files[video] for video in videos] == [True, False, True]
    assert not torch.equal(again.read(videos[1]), first.read(videos[1]))


def test_latents_beside_a_video_that_was_replaced_are_not_used(rated_videos, mesh):
    """A video is cut or sharpened in place, and the latents of `--keep_latents` stay beside it."""
    videos, prepare = rated_videos
    given = torch.ones(16, 2, 2, 2)
    write_latents(videos[0], given, vae_weights="weights")
    assert torch.equal(prepare(mesh).read(videos[0]), given)
    write_clip(videos[0], seed=99)
    encoded = prepare(mesh).read(videos[0])
    assert encoded.isfinite().all() and encoded.std() > 0  # no ones


def test_encoding_inverts_decoding(config, mesh):
    """The miniature's VAE loses little: latents that are decoded and encoded change much less than
    they vary.
    """
    trainer = Trainer(
        load_config(
            "configs/miniature.yaml",
            output_dir=config.record.output_dir,
            valid_video_csv="",
        ),
        mesh,
        CPU,
        scorers={},
    )
    trainer.iteration = 1
    rows = [0, 1, 2, 3]
    indices = trainer.run.source.choose(1).indices[:4]
    conditions = trainer.run.encoder(
        trainer.run.source.choose(1).requests[: len(indices)], (1, 32, 32)
    )
    schedule = trainer.run.source.schedule
    latents = trainer.run.source.sample(1, schedule, indices, conditions).final
    videos = trainer.run.pipeline.decode(latents, batch_size=4)
    found = torch.stack([encode(trainer.run.pipeline.vae, [videos[row]])[0] for row in rows])
    assert (found - latents).square().mean().sqrt() < 0.25 * latents.std()


def test_latents_of_another_model_stop_the_run(config, mesh, tmp_path):
    """A trained model fits its own videos better than a zero velocity does, and not latents of
    another scale.
    """
    config = config.with_settings(
        pretrained_model_root=str(ROOT / "assets/miniature"), random_weights=False
    )
    trainer = Trainer(config, mesh, CPU)
    shape = trainer.run.pipeline.latent_shape(*config.sampling.size)
    monstrous = 30 * torch.ones(shape)
    trainer.run.source.latents.read = lambda video: monstrous
    trainer.iteration = 1
    with pytest.raises(
        OffPolicyError,
        match="relative to that of a zero velocity, is .* not those of this model's VAE",
    ):
        trainer.run_iteration()


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pairs_csv": ["none.csv"]}, "pairs_csv: file not found: none.csv"),
        (
            {"num_generations": 4},
            "objective dpo needs num_generations 2",
        ),
        ({"pair_weights": "VQ=1"}, "pair_weights must be JSON"),
        ({"width": 32, "fit": "none"}, "a training video must have 16 x 32 pixels .*0a.mp4"),
        (
            {"sample_n_frames": 9},
            "a training video must last 9 frames at 8 per second .*0a.mp4.*row 1 of",
        ),
    ],
)
def test_a_run_that_cannot_train_on_pairs_is_rejected_before_a_model_is_loaded(
    config, changes, message
):
    with pytest.raises(ValueError, match=message):
        check(config.with_settings(**changes))


def test_both_videos_of_a_pair_are_on_one_replica(config):
    with pytest.raises(
        ValueError,
        match="needs an even batch_size, because both videos of a pair belong together",
    ):
        check(config.with_settings(batch_size=1), 2)


def test_a_run_on_pairs_needs_no_prompts_and_its_requests_are_those_of_the_pairs(config):
    inputs = check(config.with_settings(prompts_csv=[]))
    prompts = {request.prompt for request in inputs.videos.all_requests}
    assert prompts == {*PROMPTS} and {r.prompt for r in inputs.requests} < prompts
