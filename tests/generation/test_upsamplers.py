"""The upsamplers and the sampling of super-resolution, compared with the original's outputs."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hyvideo.generation.super_resolution import LowResolution, build, to_original
from hyvideo.models.conditions import Condition, Conditions, ImageCondition
from hyvideo.models.family import family_named, install, new_model
from hyvideo.models.guidance import Guidance
from hyvideo.models.versions import UNSUPPORTED, version_defaults
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, SamplerSettings
from hyvideo.schedulers.schedule import Schedule
from tests.models.conftest import GOLDEN, seeded_normal, transformer_weight, vae_weight

FAMILY = family_named("hunyuan_video15")
EXPECTED = json.loads((GOLDEN / "super_resolution.json").read_text())
# Tolerances are relative norms. One timestep of the original is 799.99994, not 800, and its
# embedding's frequencies come from another machine: each changes a velocity by up to 1e-5.
TOLERANCE, STAGE_TOLERANCE = 2e-6, 4e-6


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "super_resolution.safetensors")


def drawn_transformer(config):
    """Return a transformer whose weights are drawn by the original's tensor names."""
    component = FAMILY.transformer
    model = new_model(component, component.config_to_diffusers(config)).eval()
    original = component.to_original(model.state_dict())
    weights = {
        name: transformer_weight(name, tuple(tensor.shape)) for name, tensor in original.items()
    }
    model.load_state_dict(component.to_diffusers(weights), strict=True)
    return model


def drawn_upsampler(config):
    model = build(config).eval()
    weights = {
        name: vae_weight(to_original(name), tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(weights)
    FAMILY.prepare_vae(model)  # replaces layers of upsamplers
    return model


def assert_close(actual, expected, tolerance=TOLERANCE):
    assert actual.shape == expected.shape
    assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("case", EXPECTED["upsamplers"])
def test_the_upsamplers_match_the_original(golden, case):
    upsampler = drawn_upsampler(EXPECTED["upsamplers"][case])
    with torch.no_grad():
        assert_close(upsampler(seeded_normal(f"{case}/x", 2, 4, 3, 5, 7)), golden[case])


def conditions_of(case):
    """Return the original's condition of a case, with its valid tokens only."""
    settings, image = EXPECTED["cases"][case], None
    text, glyph = (
        seeded_normal(f"{case}/text", 1, 7, 24)[0, :5],
        seeded_normal(f"{case}/byt5", 1, 4, 1472)[0],
    )
    if settings["is_i2v"]:
        embeds = seeded_normal(f"{case}/image_embeds", 1, 3, 20)[0]
        frame = seeded_normal(f"{case}/image_latents", 1, 32, 1, *settings["shape"][-2:])[0, :, 0]
        image = ImageCondition(embeds, frame)
    return Conditions((Condition(text, glyph[: settings["byt5"]], image),))


def test_the_condition_is_given_from_timestep_700_on():
    """As in the original, also at exactly 700, which a schedule of 13 steps with shift 2 has."""
    model = drawn_transformer(EXPECTED["transformer"])
    low_resolution = LowResolution(model)
    low_resolution.latents = torch.full((1, 4, 2, 3, 5), 0.5)
    given = torch.cat([low_resolution.latents[0], torch.ones(1, 2, 3, 5)])
    channels = low_resolution.channels(torch.tensor([699.9, 700.0, 700.1]))
    assert torch.equal(channels, torch.stack([torch.zeros_like(given), given, given]))


@pytest.mark.parametrize("case", EXPECTED["cases"])
def test_the_stage_matches_the_original(golden, case):
    settings = EXPECTED["cases"][case]
    dtype, shape = getattr(torch, settings["dtype"]), settings["shape"]
    noise, eps = (
        torch.randn(shape, generator=torch.Generator().manual_seed(s), dtype=dtype)
        for s in (123, 77)
    )
    expected = golden[f"{case}/lr_condition"]
    upsampler = drawn_upsampler(settings["upsampler"])
    with torch.no_grad():
        condition = upsampler.condition(
            seeded_normal(f"{case}/lr_latents", *settings["lr_shape"]), eps.float()
        )
    # the original rounds the upsampled latents to the dtype of the noise
    is_rounded = dtype == torch.bfloat16
    assert_close(condition, expected, 2**-8 if is_rounded else TOLERANCE)

    transformer = drawn_transformer(EXPECTED["transformer"] | settings["transformer"])
    LowResolution(transformer).latents = expected if is_rounded else condition
    install(transformer)
    refining = [version_defaults(name) for name in UNSUPPORTED]
    (model,) = [m for m in refining if m.refines and m.num_steps == settings["steps"]]
    vae = SimpleNamespace()  # not used
    base = GRPOPipeline(
        transformer, vae, sampling=SamplerSettings(), negative=Condition(torch.zeros(1, 24))
    )
    pipeline, schedule = (
        base.with_guidance(Guidance(model.guidance_scale)),
        Schedule.ode(model.num_steps, model.shift),
    )
    latents = pipeline.sample_ode(conditions_of(case), noise, schedule)
    assert_close(latents, golden[f"{case}/latents"], STAGE_TOLERANCE)
