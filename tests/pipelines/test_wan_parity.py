"""Parity of Wan with diffusers' WanPipeline on the same weights and noise levels, from files to
latents and pixels.
"""

import json

import pytest
import torch
from diffusers import WanTransformer3DModel

from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal
from hyvideo.loading.model_setup import load_encoder, load_pipeline
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.config import Config
from scripts import export
from tests.cuda.speed import relative_difference
from tests.stock_pipeline import GivenSigmas
from tests.tiny_wan import wan_pipeline, write_wan

VERSION = "wan2.1_t2v_1.3b"
NEGATIVE = "色调艳丽，过曝，静态 “a” &amp;amp; b"
STEPS = 5
ODE = Schedule.ode(STEPS, 3.0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[False, True], ids=["wan2.1", "wan2.2-5b"])
def root(request, tmp_path_factory):
    return write_wan(tmp_path_factory.mktemp("wan"), with_vae_22=request.param)


def size_of(root):
    """Return the height and width in pixels of 4 x 6 latents."""
    config = json.loads((root / "vae" / "config.json").read_text())
    return 4 * config["scale_factor_spatial"], 6 * config["scale_factor_spatial"]


def config_for(root, **changes):
    settings = {
        "pretrained_model_root": str(root),
        "transformer_version": VERSION,
        "dtype": "fp32",
        "encoder_dtype": "fp32",
        "vae_dtype": "fp32",
        "vae_tile_size": 0,
        "sample_n_frames": 9,
        "grpo_sampling_steps": STEPS,
        "cfg_scale": 5.0,
        "negative_prompt": NEGATIVE,
    }
    return Config().with_settings(**settings | changes).resolved()


def loaded(config):
    encoder, vae = load_encoder(config, CPU)
    return encoder, load_pipeline(config, CPU, encoder=encoder, vae=vae, kinds=frozenset({"text"}))


def stock(root):
    theirs = wan_pipeline(root)
    theirs.scheduler = GivenSigmas(ODE)
    return theirs


def sample_stock(theirs, root, prompt, noise, output_type="latent"):
    height, width = size_of(root)
    guidance = {"negative_prompt": NEGATIVE, "guidance_scale": 5.0}
    shape = {"height": height, "width": width, "num_frames": 9, "num_inference_steps": STEPS}
    return theirs(
        prompt, latents=noise.clone(), output_type=output_type, **guidance, **shape
    ).frames


def test_guided_sampling_equals_diffusers_on_the_same_noise_levels(root):
    encoder, pipeline = loaded(config_for(root))
    prompt = "a “red” car，turns left"
    noise = normal(pipeline.latent_shape(9, *size_of(root)), 0, "wan")[None]
    assert noise.shape == (1, 4, 3, 4, 6)
    ours = pipeline.sample_ode(encoder([Request(prompt)]), noise, ODE)
    theirs = sample_stock(stock(root), root, prompt, noise)
    difference = relative_difference(ours, theirs)
    assert difference <= 2e-6
    assert relative_difference(ours, noise) > 0.1


def test_decoded_frames_equal_diffusers(root):
    _, pipeline = loaded(config_for(root))
    theirs = stock(root)
    noise = normal((2, *pipeline.latent_shape(5, *size_of(root))), 0, "wan")
    videos = pipeline.decode(noise, batch_size=2)
    for video, latents in zip(videos, noise):
        mean, std = (
            torch.tensor(theirs.vae.config[f"latents_{name}"]).view(1, 4, 1, 1, 1)
            for name in ("mean", "std")
        )
        with torch.no_grad():
            expected = (
                theirs.vae.decode(latents[None] / (1.0 / std) + mean).sample[0].transpose(0, 1)
            )
            floats = (
                pipeline.vae.decode(pipeline.latents.unscaled(latents[None]))
                .sample[0]
                .transpose(0, 1)
            )
        torch.testing.assert_close(floats, expected, rtol=0, atol=1e-5)
        assert (video - ((expected / 2 + 0.5).clamp(0, 1) * 255).round()).abs().max() <= 1


def test_a_video_with_non_finite_latents_is_none_although_the_decoder_clamps(root):
    _, pipeline = loaded(config_for(root))
    latents = normal((2, *pipeline.latent_shape(5, *size_of(root))), 0, "wan")
    latents[1, 0, 0, 0, 0] = float("nan")
    first, second = pipeline.decode(latents)
    assert first is not None and second is None


def test_an_exported_transformer_gives_the_same_latents_in_wan_pipeline(
    root, tmp_path, monkeypatch
):
    out = tmp_path / "exported"
    flags = [
        "--pretrained_model_root",
        root,
        "--transformer_version",
        VERSION,
        "--dtype",
        "fp32",
        "--output_dir",
        out,
    ]
    monkeypatch.setattr("sys.argv", ["export.py", *map(str, flags)])
    export.main()
    encoder, pipeline = loaded(config_for(root))
    noise = normal(pipeline.latent_shape(9, *size_of(root)), 0, "wan")[None]
    exported = stock(root)
    exported.register_modules(
        transformer=WanTransformer3DModel.from_pretrained(out / "transformer")
    )
    theirs = sample_stock(exported, root, "a “red” car", noise)
    assert (
        relative_difference(
            pipeline.sample_ode(encoder([Request("a “red” car")]), noise, ODE), theirs
        )
        <= 2e-6
    )
