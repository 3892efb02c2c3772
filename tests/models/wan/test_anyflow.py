"""Tests of AnyFlow, students of Wan with a second time embedder, beside diffusers' class and
pipeline.
"""

import diffusers
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal
from hyvideo.models.family import component_of, install, new_model
from hyvideo.models.fit_checks import check_checkpoint
from hyvideo.models.loading import (
    load_transformer,
    load_transformer_weights,
    transformer_from_config,
)
from hyvideo.models.lora import read_lora, save_lora, target_modules
from hyvideo.models.saving import save_original
from hyvideo.models.sizes import read_architecture, released_sizes
from hyvideo.models.wan.transformer import padded_texts
from hyvideo.planning.flops import count_flops, count_parameters
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import shifted_levels
from hyvideo.settings.config import Config
from hyvideo.training import saved_policy
from hyvideo.training.model_setup import load_encoder, load_pipeline
from scripts import export
from tests.cuda.speed import relative_difference
from tests.models.test_lora import assert_same
from tests.models.wan.test_lora import draw
from tests.models.wan.tiny import FAMILY, SIZES, inputs, tiny
from tests.tiny_wan import write_wan

VERSION = "wan2.1_t2v_1.3b_anyflow"
COMPONENT = FAMILY.transformer_of("AnyFlowTransformer3DModel")
ENDS = torch.tensor([833.25, 0.0, 12.5])
CPU = torch.device("cpu")


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
    return stock(
        hidden_states=latents.transpose(1, 2),
        timestep=timestep[:, None].expand(-1, frames),
        r_timestep=ends[:, None].expand(-1, frames),
        encoder_hidden_states=padded_texts(conditions),
        return_dict=False,
    )[0].transpose(1, 2)


def relative(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def test_the_velocity_depends_on_the_end_of_the_step_unlike_that_of_wan():
    model = installed()
    arguments = with_ends(2)
    with torch.no_grad():
        velocity = model(**arguments)
        assert relative(model(**arguments | {"ends": ENDS[:2] / 2}), velocity) > 1e-3
    assert model.is_flow_map
    wan = tiny()
    install(wan)
    assert not wan.is_flow_map


@pytest.mark.parametrize(
    "settings", [{"image_dim": 8}, {"cross_attn_norm": False}, {"deltatime_type": "s"}]
)
def test_an_unsupported_model_raises_an_error_that_names_the_setting(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        new_model(COMPONENT, SIZES | settings)


def test_parameters_and_flops_match_the_class(tmp_path):
    model = installed()
    model.save_config(tmp_path / "transformer")
    sizes = read_architecture(tmp_path, "anything")
    counted = count_parameters(sizes)
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    assert counted.is_flow_map
    arguments = with_ends(1)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**arguments)
    assert count_flops(sizes, (9, 48, 32), 7).total == counter.get_total_flops()
    for version in (VERSION, "wan2.1_t2v_14b_anyflow"):
        released = released_sizes(version)
        d = released.width
        more = count_parameters(released).total
        more -= count_parameters(released_sizes(version.removesuffix("_anyflow"))).total
        assert more == (256 + 1) * d + (d + 1) * d


# --- files ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_wan(tmp_path_factory.mktemp("anyflow"), is_anyflow=True)


def test_every_loading_function_gives_diffusers_class_with_its_weights(root, tmp_path):
    stock = diffusers.AnyFlowTransformer3DModel.from_pretrained(root / "transformer")
    loaded = load_transformer(root, VERSION)
    assert type(loaded) is type(stock) and component_of(loaded) is COMPONENT
    saved_policy.write_model_file(loaded, tmp_path)
    described = transformer_from_config(tmp_path / saved_policy.MODEL_FILE)
    described.to_empty(device="cpu")
    load_transformer_weights(described, root / "transformer")
    for model in (loaded, described):
        assert not list(model.named_buffers())
        assert_same_tensors(model, stock)
    assert check_checkpoint(root, VERSION, [Request("a car")]) == []


def assert_same_tensors(model, expected):
    state = expected.state_dict()
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_weights_of_wan_are_rejected(root, tmp_path):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="WanTransformer3DModel"):
        load_transformer_weights(load_transformer(root, VERSION), tmp_path)


def test_an_export_is_read_by_diffusers_and_has_no_other_form(root, tmp_path, monkeypatch):
    model = load_transformer(root, VERSION)
    with pytest.raises(ValueError, match="has only diffusers' layout"):
        save_original(model, tmp_path / "original")
    out = tmp_path / "exported"
    flags = [
        "--model_path",
        root,
        "--transformer_version",
        VERSION,
        "--dtype",
        "fp32",
        "--out",
        out,
    ]
    monkeypatch.setattr("sys.argv", ["export.py", *map(str, flags)])
    export.main()
    again = diffusers.AnyFlowTransformer3DModel.from_pretrained(out / "transformer")
    assert_same_tensors(model, again)


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
    assert_same(read_lora(tmp_path), lora)


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
    assert config.record.validation_steps == 4
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
