"""The two experts of Wan2.2 A14B: which one predicts, beside diffusers' pipelines; what is trained,
and what is refused.
"""

import json
from dataclasses import replace

import diffusers
import pytest
import torch
from PIL import Image

from hyvideo.data.images import fit, read_image, to_pixels
from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal
from hyvideo.loading.model_setup import load_encoder, load_pipeline
from hyvideo.models.guidance import expert_at
from hyvideo.models.wan import tiny
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.config import Config
from tests.cuda.speed import relative_difference
from tests.stock_pipeline import GivenSigmas

T2V, I2V = "wan2.2_t2v_a14b", "wan2.2_i2v_a14b"
PROMPT, NEGATIVE = "a red car turns left", "a car"
SIZE = (9, 32, 48)  # frames, height, width: 3 x 4 x 6 latents
CPU = torch.device("cpu")
# Steps of the high-noise expert, by shift and number of steps (facts of t2v and i2v).
HIGH = {
    (3, 4): (2, 2),
    (3, 8): (3, 3),
    (3, 10): (4, 3),
    (3, 20): (7, 6),
    (5, 4): (2, 2),
    (5, 8): (4, 3),
    (5, 20): (9, 8),
    (12, 4): (3, 3),
    (12, 8): (6, 5),
    (12, 20): (13, 12),
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folders = {}
    for version in (T2V, I2V):
        folders[version] = tmp_path_factory.mktemp(version)
        tiny.write(folders[version], version, num_heads=2, prompts=[PROMPT, NEGATIVE])
    return folders


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return the paths of a first and of a last frame."""
    folder = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    paths = []
    for name in ("first.png", "last.png"):
        values = torch.rand(70, 90, 3, generator=generator)
        Image.fromarray((values * 255).byte().numpy()).save(folder / name)
        paths.append(str(folder / name))
    return paths


def config_of(root, version=T2V, **changes):
    settings = {
        "pretrained_model_root": str(root),
        "transformer_version": version,
        "dtype": "fp32",
        "encoder_dtype": "fp32",
        "vae_dtype": "fp32",
        "vae_tile_size": 0,
        "sample_n_frames": SIZE[0],
        "height": SIZE[1],
        "width": SIZE[2],
        "negative_prompt": NEGATIVE,
    }
    return Config().with_settings(**settings | changes).resolved()


def loaded(config, kinds=("text",)):
    encoder, vae = load_encoder(config, CPU)
    return encoder, load_pipeline(config, CPU, encoder=encoder, vae=vae, kinds=frozenset(kinds))


def count_calls(*modules):
    counts = [0] * len(modules)

    def count(number):
        def hook(*_):
            counts[number] += 1

        return hook

    for number, module in enumerate(modules):
        module.register_forward_pre_hook(count(number), with_kwargs=False)
    return counts


def stock(root, schedule, **changes):
    index = json.loads((root / "model_index.json").read_text())
    pipeline = getattr(diffusers, index["_class_name"]).from_pretrained(
        root, local_files_only=True, **changes
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = GivenSigmas(schedule)
    return pipeline


def latents_of(pipeline, noise, num_steps, **inputs):
    return pipeline(
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        latents=noise.clone(),
        num_frames=SIZE[0],
        height=SIZE[1],
        width=SIZE[2],
        num_inference_steps=num_steps,
        guidance_scale=4.0,
        guidance_scale_2=3.0,
        output_type="latent",
        **inputs,
    ).frames


@pytest.mark.parametrize("expert", ["high", "low"])
@pytest.mark.parametrize("shift, steps", [(3, 10), (5, 4), (12, 4)])
def test_guided_sampling_equals_diffusers_with_either_expert_as_the_policy(
    roots, shift, steps, expert
):
    """At shift 3 with 10 steps, a timestep is exactly 875: the high-noise expert's."""
    root, schedule = roots[T2V], Schedule.ode(steps, shift)
    scales = {"cfg_scale": 4.0, "low_noise_cfg_scale": 3.0}
    encoder, pipeline = loaded(config_of(root, expert=expert, **scales))
    noise = normal(pipeline.latent_shape(*SIZE), 0, "wan")[None]
    counts = count_calls(pipeline.transformer, pipeline.partner.transformer)
    ours = pipeline.sample_ode(encoder([Request(PROMPT)]), noise, schedule)
    theirs = latents_of(stock(root, schedule), noise, steps)
    assert relative_difference(ours, theirs) <= 2e-6
    high, _ = HIGH[shift, steps]
    by_expert = counts if expert == "high" else counts[::-1]
    assert by_expert == [high, steps - high]


def test_the_table_of_steps_of_image_to_video():
    for (shift, steps), (t2v, i2v) in HIGH.items():
        levels = Schedule.ode(steps, shift).sigmas[:-1]
        for boundary, expected in ((0.875, t2v), (0.9, i2v)):
            assert sum(expert_at(level, boundary) == "high" for level in levels) == expected


@pytest.mark.parametrize(
    "shift, steps, has_last_frame", [(5, 4, False), (3, 10, False), (5, 4, True)]
)
def test_image_to_video_equals_diffusers(roots, images, shift, steps, has_last_frame):
    root, schedule = roots[I2V], Schedule.ode(steps, shift)
    scales = {"cfg_scale": 4.0, "low_noise_cfg_scale": 3.0}
    encoder, pipeline = loaded(config_of(root, I2V, **scales), ("text", "image"))
    noise = normal(pipeline.latent_shape(*SIZE), 0, "wan")[None]
    theirs = stock(root, schedule)
    given = images[: 1 + has_last_frame]
    # both encode the pictures that this project fits to the size
    frames = [to_pixels(fit(read_image(path), *SIZE[1:]))[None] for path in given]
    with torch.no_grad():
        _, condition = theirs.prepare_latents(
            frames[0],
            1,
            16,
            *SIZE[1:],
            SIZE[0],
            torch.float32,
            CPU,
            None,
            noise.clone(),
            *frames[1:],
        )
    conditions = encoder([Request(PROMPT, *given)], SIZE)
    found = conditions.samples[0].image.latents
    assert torch.equal(found[:4], condition[0, :4])  # the mask
    torch.testing.assert_close(found, condition[0], atol=1e-5, rtol=0)
    ours = pipeline.sample_ode(conditions, noise, schedule)
    pictures = dict(zip(("image", "last_image"), frames))
    theirs_latents = latents_of(theirs, noise, steps, **pictures)
    assert relative_difference(ours, theirs_latents) <= 2e-6


@pytest.mark.parametrize("boundary, alone", [(0.0, "high"), (1.1, "low")])
def test_at_the_ends_of_the_boundary_one_expert_predicts_alone(roots, boundary, alone):
    encoder, pipeline = loaded(config_of(roots[T2V], cfg_scale=1.0, low_noise_cfg_scale=1.0))
    noise, schedule = normal(pipeline.latent_shape(*SIZE), 0, "wan")[None], Schedule.ode(4, 5.0)
    conditions = encoder([Request(PROMPT)])
    both = pipeline.sample_ode(conditions, noise, schedule)
    pipeline.partner = replace(pipeline.partner, boundary=boundary)
    found = pipeline.sample_ode(conditions, noise, schedule)
    if alone == "low":
        pipeline.transformer = pipeline.partner.transformer
    pipeline.partner = None
    assert torch.equal(found, pipeline.sample_ode(conditions, noise, schedule))
    assert relative_difference(found, both) > 1e-2


def test_swapped_experts_and_swapped_scales_change_the_videos(roots):
    scales = {"cfg_scale": 4.0, "low_noise_cfg_scale": 2.0}
    encoder, pipeline = loaded(config_of(roots[T2V], **scales))
    noise, schedule = normal(pipeline.latent_shape(*SIZE), 0, "wan")[None], Schedule.ode(4, 5.0)
    conditions = encoder([Request(PROMPT)])
    right = pipeline.sample_ode(conditions, noise, schedule)
    guidance = pipeline.sampling.guidance
    swapped = pipeline.with_guidance(replace(guidance, scale=2.0, low_noise_scale=4.0))
    assert relative_difference(swapped.sample_ode(conditions, noise, schedule), right) > 1e-2
    partner = pipeline.partner
    pipeline.partner = replace(partner, transformer=pipeline.transformer)
    pipeline.transformer = partner.transformer
    assert relative_difference(pipeline.sample_ode(conditions, noise, schedule), right) > 1e-2


def test_a_forward_pass_of_both_experts_is_refused(roots):
    encoder, pipeline = loaded(config_of(roots[T2V]))
    noise = normal((2, *pipeline.latent_shape(*SIZE)), 0, "wan")
    conditions = encoder([Request(PROMPT)] * 2)
    with pytest.raises(AssertionError, match="900"):
        pipeline.velocity(noise, torch.tensor([900.0, 500.0]), conditions)
