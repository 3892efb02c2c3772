"""Tests of AnyFlow, students of Wan with a second time embedder, beside diffusers' class and
pipeline.
"""

import diffusers
import pytest
import torch

from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal
from hyvideo.loading.model_setup import load_encoder, load_pipeline
from hyvideo.models.family import install, new_model
from hyvideo.models.loading import (
    load_transformer,
    load_transformer_weights,
)
from hyvideo.models.lora import target_modules
from hyvideo.models.lora_files import read_lora
from hyvideo.models.lora_saving import save_lora
from hyvideo.models.wan.settings import TEXT_SLOTS
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import shifted_levels
from hyvideo.settings.config import Config
from tests.cuda.speed import relative_difference
from tests.forked import built_once
from tests.models.test_lora import assert_same_changes
from tests.models.wan.test_lora import draw
from tests.models.wan.tiny import FAMILY, SIZES, inputs, tiny
from tests.stock_models import padded
from tests.tiny_wan import write_wan

VERSION = "wan2.1_t2v_1.3b_anyflow"
COMPONENT = FAMILY.transformer_of("AnyFlowTransformer3DModel")
ENDS = torch.tensor([833.25, 0.0, 12.5])
CPU = torch.device("cpu")


@built_once
def tiny_anyflow(**settings):
    """Return a small model with nonzero random weights."""
    torch.manual_seed(0)
    model = new_model(COMPONENT, SIZES | settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def installed(**settings):
    model = tiny_anyflow(**settings)
    install(model)
    return model


def with_ends(batch=2):
    return inputs(batch) | {"ends": ENDS[:batch]}


def stock_velocity(stock, latents, timestep, conditions, ends):
    """Return the velocity of diffusers' class, which takes frames before channels and a timestep
    for each frame.
    """
    frames = latents.shape[2]
    texts, _ = padded([sample.text for sample in conditions], TEXT_SLOTS)
    return stock(
        hidden_states=latents.transpose(1, 2),
        timestep=timestep[:, None].expand(-1, frames),
        r_timestep=ends[:, None].expand(-1, frames),
        encoder_hidden_states=texts,
        return_dict=False,
    )[0].transpose(1, 2)


def relative(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


# --- files ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_wan(tmp_path_factory.mktemp("anyflow"), is_anyflow=True)


def test_weights_of_wan_are_rejected(root, tmp_path):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="WanTransformer3DModel"):
        load_transformer_weights(load_transformer(root, VERSION), tmp_path)


def test_a_lora_has_the_modules_of_wan_and_reads_the_originals_names(tmp_path):
    model = tiny_anyflow()
    assert target_modules(model, [FAMILY.target_modules]) == target_modules(
        tiny(), [FAMILY.target_modules]
    )
    assert target_modules(model, [r"self_attn\.q", "delta_embedder.linear_1"]) == [
        "condition_embedder.delta_embedder.linear_1",
        "blocks.0.attn1.to_q",
        "blocks.1.attn1.to_q",
    ]
    lora = draw(model)
    save_lora(lora, tmp_path, form="original")
    assert_same_changes(read_lora(tmp_path), lora)


# --- sampling ---------------------------------------------------------------------------------------


def loaded_pipeline(root):
    settings = {
        "pretrained_model_root": str(root),
        "transformer_version": VERSION,
        "dtype": "fp32",
        "encoder_dtype": "fp32",
        "sample_n_frames": 9,
        "grpo_sampling_steps": 4,
    }
    config = Config().with_settings(**settings).resolved()
    encoder, vae = load_encoder(config, CPU)
    pipeline = load_pipeline(config, CPU, encoder=encoder, vae=vae, kinds=frozenset({"text"}))
    return config, encoder, pipeline


def test_sampling_of_four_steps_equals_diffusers_pipeline(root):
    config, encoder, pipeline = loaded_pipeline(root)
    assert (config.rollout.cfg_scale, config.rollout.shift) == (1.0, 5.0)
    assert config.validation.validation_steps == 4
    stock = diffusers.AnyFlowPipeline.from_pretrained(root, local_files_only=True)
    stock.set_progress_bar_config(disable=True)
    stock.scheduler.set_timesteps(4)
    assert stock.scheduler.sigmas.tolist() == pytest.approx(shifted_levels(4, 5.0), abs=1e-15)
    prompt = "a “red” car，turns left"
    noise = normal(pipeline.latent_shape(9, 32, 48), 0, "anyflow")[None]
    ours = pipeline.sample_ode(encoder([Request(prompt)]), noise, Schedule.ode(4, 5.0))
    theirs = stock(
        prompt,
        latents=noise.clone(),
        height=32,
        width=48,
        num_frames=9,
        num_inference_steps=4,
        output_type="latent",
    ).frames
    if theirs.shape != ours.shape:
        theirs = theirs.transpose(1, 2)
    difference = relative_difference(ours, theirs)
    print(f"four steps: {difference:.2g}")
    assert difference <= 2e-6
    assert relative_difference(ours, noise) > 0.1
