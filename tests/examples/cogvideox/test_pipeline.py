"""The example family CogVideoX against diffusers' CogVideoXPipeline on the same files: texts, sampling,
decoding and an exported transformer.
"""

import pytest
import torch
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel

from hyvideo.config.config import Config
from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal
from hyvideo.schedulers.schedule import Schedule
from hyvideo.training.model_setup import load_encoder, load_pipeline
from scripts import export
from tests.cuda.speed import relative_difference
from tests.examples.cogvideox.tiny import (
    FOLDER,
    MODULE,
    VERSION,
    noise_levels,
    schedule,
    write_cogvideox,
)
from tests.registered import registered

STEPS = 8
PROMPT, NEGATIVE = "a red car turns left", "a car"
SIZE = (17, 32, 48)  # frames, height, width
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def family():
    with registered(MODULE):
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_cogvideox(tmp_path_factory.mktemp("cogvideox"))


@pytest.fixture(scope="module")
def loaded(root):
    """The encoder and the sampling pipeline of this project."""
    settings = {
        "pretrained_model_root": str(root),
        "transformer_version": VERSION,
        "dtype": "fp32",
        "encoder_dtype": "fp32",
        "vae_dtype": "fp32",
        "vae_tile_size": 0,
        "cfg_scale": 6.0,
        "negative_prompt": NEGATIVE,
    }
    config = Config().with_settings(**settings).resolved()
    encoder, vae = load_encoder(config, CPU)
    pipeline = load_pipeline(config, CPU, encoder=encoder, vae=vae, kinds=frozenset({"text"}))
    return encoder, pipeline


def stock(root, **parts):
    pipeline = CogVideoXPipeline.from_pretrained(root, local_files_only=True, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sampled(pipeline, noise, output_type="latent"):
    frames, height, width = SIZE
    found = pipeline(
        PROMPT,
        negative_prompt=NEGATIVE,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=STEPS,
        guidance_scale=6.0,
        latents=noise.transpose(1, 2),
        output_type=output_type,
    )
    return found.frames.transpose(1, 2)


def ours(loaded, noise):
    encoder, pipeline = loaded
    scheduler = schedule()
    scheduler.set_timesteps(STEPS)
    levels = ",".join(map(str, noise_levels()[scheduler.timesteps].tolist()))
    return pipeline.sample_ode(encoder([Request(PROMPT)]), noise, Schedule.ode(STEPS, 1.0, levels))


@pytest.fixture(scope="module")
def noise(loaded):
    return normal(loaded[1].latent_shape(*SIZE), 0, "cogvideox")[None]


def test_guided_sampling_equals_diffusers_on_its_own_noise_levels(root, loaded, noise):
    assert noise.shape == (1, 16, 5, 4, 6)
    found, expected = ours(loaded, noise), sampled(stock(root), noise)
    assert relative_difference(found, expected) <= 5e-6
    assert relative_difference(found, noise) > 0.1


def test_decoded_frames_equal_diffusers(root, loaded, noise):
    _, pipeline = loaded
    (video,) = pipeline.decode(noise)
    theirs = stock(root)
    with torch.no_grad():
        expected = theirs.decode_latents(noise.transpose(1, 2))[0]
    expected = ((expected.transpose(0, 1) / 2 + 0.5).clamp(0, 1) * 255).round()
    assert video.shape == expected.shape == (17, 3, 32, 48)
    assert (video - expected).abs().max() <= 1 and expected.std() > 1


def test_a_short_prompt_is_padded_as_in_diffusers(root, loaded):
    encoder, _ = loaded
    (condition,) = encoder([Request(PROMPT)]).samples
    with torch.no_grad():
        expected = stock(root).encode_prompt(PROMPT, do_classifier_free_guidance=False)[0]
    assert condition.text.shape == (226, 32)
    torch.testing.assert_close(condition.text, expected[0], rtol=1e-4, atol=1e-5)


def test_a_prompt_of_more_than_226_tokens_is_cut_as_in_diffusers(root, loaded):
    encoder, _ = loaded
    prompt = "a car " * 150
    with pytest.warns(UserWarning, match="301 tokens, but the model reads at most 226"):
        (condition,) = encoder([Request(prompt)]).samples
    with torch.no_grad():
        expected = stock(root).encode_prompt(prompt, do_classifier_free_guidance=False)[0]
    torch.testing.assert_close(condition.text, expected[0], rtol=1e-4, atol=1e-5)


def test_an_exported_transformer_gives_the_same_latents_in_cogvideox_pipeline(
    root, loaded, noise, tmp_path, monkeypatch
):
    out = tmp_path / "exported"
    flags = ["--pretrained_model_root", root, "--family", FOLDER]
    flags += ["--transformer_version", VERSION, "--dtype", "fp32", "--output_dir", out]
    monkeypatch.setattr("sys.argv", ["export.py", *map(str, flags)])
    export.main()
    exported = CogVideoXTransformer3DModel.from_pretrained(out / "transformer")
    assert (
        relative_difference(ours(loaded, noise), sampled(stock(root, transformer=exported), noise))
        <= 5e-6
    )
