"""Training on reference images, and conditions that are encoded before training."""

import pytest
import torch

from hyvideo.models.hunyuan_video15.transformer import _image_channels
from hyvideo.trainer import Trainer
from tests.tiny_checkpoint import write_image, write_original

CPU = torch.device("cpu")
CAPTIONS = ["a red circle moves up", "a blue square moves left"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_original(tmp_path_factory.mktemp("tiny") / "ckpts", ("480p_i2v", "480p_t2v"))


@pytest.fixture
def config(tiny_config, root, tmp_path):
    """Two prompts of four rollouts each: one with an image, one without."""
    image = write_image(tmp_path / "image.png")
    csv = tmp_path / "prompts.csv"
    csv.write_text(f"prompt,ref_image_path\n{CAPTIONS[0]},{image}\n{CAPTIONS[1]},\n")
    return tiny_config.with_settings(
        pretrained_model_root=str(root),
        transformer_version="480p_i2v",
        random_weights=False,
        prompts_csv=str(csv),
        height=32,
        width=32,
        grpo_sampling_steps=2,
        cfg_scale=2.0,
        mini_batch_size_per_update=4,
    )


def iterations(config, mesh, count=1):
    trainer = Trainer(config, mesh, CPU)
    metrics = []
    for _ in range(count):
        trainer.iteration += 1
        metrics.append(trainer.run_iteration())
    return trainer, metrics


def test_rows_with_and_without_image_train_together(config, mesh):
    trainer, (metrics,) = iterations(config, mesh)
    assert metrics["policy/ratio_max_deviation"] < 1e-5
    assert metrics["grad/norm"] > 0
    trained = {
        name for name, p in trainer.run.policy.transformer.named_parameters() if p.requires_grad
    }
    assert any(name.startswith("image_embedder.") for name in trained)
    # no prompt has quoted text
    assert not any(name.startswith("context_embedder_2.") for name in trained)


def test_the_policy_receives_the_first_frame_of_a_rollout(config, mesh):
    """The latents of the frame are scaled and kept in float32, like those that are sampled."""
    trainer = Trainer(config.with_settings(vae_dtype="bf16"), mesh, CPU)
    (condition,) = trainer.run.encoder(trainer.run.source.requests[:1], (1, 32, 32)).samples
    assert condition.image.latents.dtype == torch.float32
    with_image, without = (
        _image_channels(
            torch.zeros(1, 4, 2, 2, 2), trainer.run.encoder([request], (1, 32, 32)).samples
        )
        for request in trainer.run.source.requests
    )
    assert (
        with_image[0, 4, 0].eq(1).all()
        and with_image[0, :4, 0].any()
        and not with_image[0, :, 1:].any()
    )
    assert not without.any()


def test_a_text_to_video_version_rejects_images(config, mesh):
    with pytest.raises(ValueError, match="for text-to-video, got 1 reference images"):
        Trainer(config.with_settings(transformer_version="480p_t2v"), mesh, CPU)


def test_an_image_to_video_version_without_any_image_is_rejected_before_loading(
    config, mesh, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "hyvideo.loading.model_setup.loading.load_vae", lambda *_, **__: pytest.fail("was loaded")
    )
    csv = tmp_path / "no_images.csv"
    csv.write_text("\n".join(["prompt", *CAPTIONS]) + "\n")
    message = (
        "is for image-to-video, got no reference image for the 2 prompts of prompts_csv; add a "
        "column.* or use"
    )
    with pytest.raises(ValueError, match=message):
        Trainer(config.with_settings(prompts_csv=str(csv)), mesh, CPU)


def test_quoted_text_of_the_negative_prompt_is_not_encoded(config, mesh):
    """The prompts themselves have no quoted text."""
    config = config.with_settings(
        negative_prompt='blurry, a sign says "NO"', precompute_conditions=True
    )
    trainer = Trainer(config, mesh, CPU)
    assert (
        trainer.run.pipeline.negative.glyph is None and trainer.run.pipeline.negative.image is None
    )
    stored = sorted(
        path.name.split("-")[0] for path in (trainer.output_dir / "conditions").iterdir()
    )
    assert stored == ["image", "text", "text", "text"]
    assert not any(name.startswith("context_embedder_2.") for name in trainer.run.policy.trained)


def test_the_identity_of_an_encoder_depends_on_its_weights(config, tmp_path):
    from hyvideo.loading.model_setup import load_encoder

    first, _ = load_encoder(config, CPU)
    changed = write_original(tmp_path / "changed", ("480p_i2v",), seed=1)
    second, _ = load_encoder(config.with_settings(pretrained_model_root=str(changed)), CPU)
    assert first.identity != second.identity
    again, _ = load_encoder(config, CPU)
    assert first.identity == again.identity
