"""Videos from a first frame by Wan2.2 TI2V-5B: the velocity and the samples of diffusers, and a
first frame that no sampler and no loss changes.
"""

import math
from dataclasses import replace

import pytest
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image

from hyvideo.data.images import fit, read_image
from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal
from hyvideo.loading.model_setup import (
    check_checkpoint,
    load_encoder,
    load_pipeline,
)
from hyvideo.models.conditions import ImageCondition
from hyvideo.models.wan import tiny
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.config import Config
from tests.cuda.speed import relative_difference
from tests.models.wan.tiny import inputs, installed
from tests.stock_models import stock_inputs, stock_twin
from tests.stock_pipeline import GivenSigmas
from tests.tiny_checkpoint import write_image
from tests.tiny_wan import write_wan

VERSION = "wan2.2_ti2v_5b"
PROMPT, NEGATIVE = "a red car turns left", "a car"
SIZE = (9, 64, 96)  # frames, height, width: 3 x 4 x 6 latents
STEPS = 6
CPU = torch.device("cpu")


def with_image(arguments, rows=(0,)):
    """Return the inputs with a first frame in these rows."""
    generator = torch.Generator().manual_seed(5)
    conditions = [
        replace(sample, image=ImageCondition(None, torch.randn(4, 6, 4, generator=generator)))
        if row in rows
        else sample
        for row, sample in enumerate(arguments["conditions"])
    ]
    return arguments | {"conditions": conditions}


def stock_velocity(model, latents, timestep, conditions):
    """Return the velocity of diffusers' forward pass, with one timestep per token."""
    latents, tokens = latents.clone(), math.prod(latents.shape[2:]) // 4
    times = timestep[:, None].repeat(1, tokens)
    for row, sample in enumerate(conditions):
        if sample.image is not None:
            latents[row, :, 0] = sample.image.latents
            times[row, : tokens // latents.shape[2]] = 0
    return model(**stock_inputs(model, latents, times, conditions))[0]


def test_the_velocity_of_the_other_frames_equals_diffusers():
    model, arguments = installed(), with_image(inputs(3), rows=(0, 2))
    with torch.no_grad():
        expected = stock_velocity(stock_twin(model), **arguments)
        found = model(**arguments)
        without = model(**inputs(3))
    torch.testing.assert_close(found[:, :, 1:], expected[:, :, 1:], rtol=1e-5, atol=1e-5)
    # a row without an image is as in text-to-video
    torch.testing.assert_close(found[1], without[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[0, :, 1:], without[0, :, 1:], atol=1e-2)


def test_the_velocity_of_the_first_frame_leads_to_the_image_whatever_the_weights():
    arguments = with_image(inputs(2), rows=(0, 1))
    with torch.no_grad():
        first, other = (installed(seed)(**arguments)[:, :, 0] for seed in (0, 1))
    assert torch.equal(first, other)
    sigma = (arguments["timestep"] / 1000).view(-1, 1, 1, 1)
    reached = arguments["latents"][:, :, 0] - sigma * first
    expected = torch.stack([sample.image.latents for sample in arguments["conditions"]])
    torch.testing.assert_close(reached, expected)


# --- from files to latents ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("ti2v")
    tiny.write(root, VERSION, num_heads=2, prompts=[PROMPT, NEGATIVE])
    return root


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "image.png"
    values = torch.rand(70, 90, 3, generator=torch.Generator().manual_seed(0))
    Image.fromarray((values * 255).byte().numpy()).save(path)
    return str(path)


@pytest.fixture(scope="module")
def loaded(root):
    settings = {
        "pretrained_model_root": str(root),
        "transformer_version": VERSION,
        "dtype": "fp32",
        "encoder_dtype": "fp32",
        "vae_dtype": "fp32",
        "vae_tile_size": 0,
        "cfg_scale": 5.0,
        "negative_prompt": NEGATIVE,
        "grpo_sampling_steps": STEPS,
        "eta": 0.7,
    }
    config = Config().with_settings(**settings).resolved()
    encoder, vae = load_encoder(config, CPU)
    kinds = frozenset({"text", "image"})
    return config, encoder, load_pipeline(config, CPU, encoder=encoder, vae=vae, kinds=kinds)


def encoded(loaded, image):
    frames, height, width = SIZE
    _, encoder, pipeline = loaded
    conditions = encoder([Request(PROMPT, image)], SIZE)
    return conditions, normal(pipeline.latent_shape(frames, height, width), 0, "ti2v")[None]


def test_guided_samples_equal_diffusers_image_to_video_pipeline(root, loaded, image):
    conditions, noise = encoded(loaded, image)
    schedule = Schedule.ode(STEPS, 5.0)
    found = loaded[2].sample_ode(conditions, noise, schedule)
    theirs = WanImageToVideoPipeline.from_pretrained(
        root,
        local_files_only=True,
        image_encoder=None,
        image_processor=None,
        expand_timesteps=True,
    )
    theirs.set_progress_bar_config(disable=True)
    theirs.scheduler = GivenSigmas(schedule)
    expected = theirs(
        fit(read_image(image), *SIZE[1:]),
        PROMPT,
        NEGATIVE,
        height=SIZE[1],
        width=SIZE[2],
        num_frames=SIZE[0],
        num_inference_steps=STEPS,
        guidance_scale=5.0,
        latents=noise.clone(),
        output_type="latent",
    ).frames
    difference = relative_difference(found, expected)
    print(f"difference {difference:.2g}")
    assert difference <= 1e-5
    torch.testing.assert_close(
        found[0, :, 0], conditions.samples[0].image.latents, atol=1e-4, rtol=0
    )


def test_stochastic_rollouts_end_at_the_first_frame(loaded, image):
    config, _, pipeline = loaded
    conditions, noise = encoded(loaded, image)
    schedule = config.with_settings(last_step="deterministic").sampling.schedule()
    assert schedule.stochastic_steps
    final = pipeline.sample(
        conditions, noise, schedule, lambda step: normal(noise.shape, 0, "step", step)
    ).final
    torch.testing.assert_close(
        final[0, :, 0], conditions.samples[0].image.latents, atol=1e-3, rtol=0
    )


def test_images_are_accepted_by_a_ti2v_model_and_rejected_by_a_t2v_model(root, tmp_path, loaded):
    path = write_image(tmp_path / "image.png")
    requests = {"prompts": [Request(PROMPT, path), Request(PROMPT)]}
    config = loaded[0]
    assert check_checkpoint(config, requests, [SIZE]) == {"text", "image"}
    other = config.with_settings(
        pretrained_model_root=str(write_wan(tmp_path / "wan2.1")),
        transformer_version="wan2.1_t2v_1.3b",
    )
    with pytest.raises(ValueError, match="reference images"):
        check_checkpoint(other, requests, [SIZE])
