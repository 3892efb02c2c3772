"""The example family Mochi against diffusers' MochiPipeline on the same files: texts, sampling,
decoding and an exported transformer.
"""

import pytest
import torch
from diffusers import MochiPipeline, MochiTransformer3DModel
from diffusers.pipelines.mochi.pipeline_mochi import linear_quadratic_schedule

from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal
from hyvideo.loading.model_setup import load_encoder, load_pipeline
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.config import Config
from scripts import export
from tests.cuda.speed import relative_difference
from tests.examples.mochi.tiny import FOLDER, VERSION, write_mochi
from tests.registered import registered

STEPS = 8
PROMPT, NEGATIVE = "a red car turns left", "a car"
SIZE = (13, 32, 48)  # frames, height, width
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def family():
    with registered(FOLDER):
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_mochi(tmp_path_factory.mktemp("mochi"))


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
        "cfg_scale": 4.5,
        "negative_prompt": NEGATIVE,
    }
    config = Config().with_settings(**settings).resolved()
    encoder, vae = load_encoder(config, CPU)
    pipeline = load_pipeline(config, CPU, encoder=encoder, vae=vae, kinds=frozenset({"text"}))
    return encoder, pipeline


def stock(root, **parts):
    pipeline = MochiPipeline.from_pretrained(root, local_files_only=True, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sampled(pipeline, noise, output_type="latent"):
    frames, height, width = SIZE
    return pipeline(
        PROMPT,
        negative_prompt=NEGATIVE,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=STEPS,
        guidance_scale=4.5,
        latents=noise.clone(),
        output_type=output_type,
    ).frames


def ours(loaded, noise):
    encoder, pipeline = loaded
    levels = ",".join(map(str, linear_quadratic_schedule(STEPS, 0.025)))
    return pipeline.sample_ode(encoder([Request(PROMPT)]), noise, Schedule.ode(STEPS, 1.0, levels))


@pytest.fixture(scope="module")
def noise(loaded):
    return normal(loaded[1].latent_shape(*SIZE), 0, "mochi")[None]


def test_guided_sampling_equals_diffusers_on_its_own_noise_levels(root, loaded, noise):
    assert noise.shape == (1, 12, 3, 4, 6)
    found, expected = ours(loaded, noise), sampled(stock(root), noise)
    assert relative_difference(found, expected) <= 5e-6
    assert relative_difference(found, noise) > 0.1


def test_decoded_frames_equal_diffusers(root, loaded, noise):
    _, pipeline = loaded
    (video,) = pipeline.decode(noise)
    theirs = stock(root)
    config = theirs.vae.config
    mean, std = (
        torch.tensor(values).view(1, 12, 1, 1, 1)
        for values in (config.latents_mean, config.latents_std)
    )
    with torch.no_grad():
        expected = theirs.vae.decode(noise * std / config.scaling_factor + mean).sample[0]
    expected = ((expected.transpose(0, 1) / 2 + 0.5).clamp(0, 1) * 255).round()
    assert video.shape == expected.shape == (13, 3, 32, 48)
    assert (video - expected).abs().max() <= 1 and expected.std() > 1


def test_a_prompt_of_more_than_256_tokens_is_cut_as_in_diffusers(root, loaded):
    encoder, _ = loaded
    prompt = "a car " * 150
    with pytest.warns(UserWarning, match="301 tokens.*256"):
        (condition,) = encoder([Request(prompt)]).samples
    with torch.no_grad():
        expected, mask = stock(root)._get_t5_prompt_embeds(prompt)
    assert mask.all()
    torch.testing.assert_close(condition.text, expected[0], rtol=1e-4, atol=1e-5)


def test_an_exported_transformer_gives_the_same_latents_in_mochi_pipeline(
    root, loaded, noise, tmp_path, monkeypatch
):
    out = tmp_path / "exported"
    flags = ["--pretrained_model_root", root, "--family", FOLDER]
    flags += ["--transformer_version", VERSION, "--dtype", "fp32", "--output_dir", out]
    monkeypatch.setattr("sys.argv", ["export.py", *map(str, flags)])
    export.main()
    exported = MochiTransformer3DModel.from_pretrained(out / "transformer")
    assert (
        relative_difference(ours(loaded, noise), sampled(stock(root, transformer=exported), noise))
        <= 5e-6
    )
