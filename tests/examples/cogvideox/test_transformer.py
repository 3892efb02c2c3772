"""The transformer of the example family CogVideoX against diffusers' class: velocity, gradients,
adapters, ranks and sizes.
"""

import json

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel

from examples.cogvideox import thin
from examples.cogvideox.diffusion import Diffusion
from hyvideo.models.family import component_of, family_of, new_model
from hyvideo.models.lora import (
    add_trainable_lora,
    current_lora,
    read_lora,
    save_lora,
    target_modules,
    training_config,
)
from hyvideo.models.sizes import sizes_module
from tests.distributed.launch import launch
from tests.examples.cogvideox.tiny import (
    MODULE,
    inputs,
    installed,
    noise_levels,
    schedule,
    stock_velocity,
    tiny,
)
from tests.registered import registered


@pytest.fixture(scope="module", autouse=True)
def family():
    with registered(MODULE):
        yield family_of("CogVideoXTransformer3DModel")


@pytest.mark.parametrize("batch", [1, 3])
def test_velocity_and_gradients_equal_diffusers(batch):
    arguments = inputs(batch)
    velocities, gradients = [], []
    for model, forward in ((tiny(), stock_velocity), (installed(), None)):
        velocity = forward(model, **arguments) if forward else model(**arguments)
        velocity.square().sum().backward()
        velocities.append(velocity.detach())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*velocities, rtol=1e-5, atol=1e-5)
    assert velocities[0].std() > 0.1
    expected, found = gradients
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=3e-5)


def test_every_parameter_has_a_gradient():
    model = installed()
    model(**inputs()).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_the_times_of_the_training_are_exact_and_others_between_them():
    sigma = noise_levels()
    whole = Diffusion(sigma.float().view(-1, 1, 1, 1, 1)).times
    assert torch.equal(whole, torch.arange(1000.0))
    middle = (sigma[1:] + sigma[:-1]) / 2
    times = Diffusion(middle.float().view(-1, 1, 1, 1, 1)).times
    assert torch.equal(times, torch.arange(999.0) + 0.5)
    smaller = Diffusion(torch.tensor([0.0, 0.01]).view(-1, 1, 1, 1, 1)).times
    assert torch.equal(smaller, torch.zeros(2))


@pytest.mark.parametrize("time", [0, 500, 999])
def test_the_velocity_of_an_exact_prediction_is_noise_less_data(time):
    data, noise = torch.randn(2, 1, 16, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    squares = schedule().alphas_cumprod[time]
    weights = float(squares.sqrt()), float((1 - squares).sqrt())
    sample = weights[0] * data + weights[1] * noise
    prediction = weights[0] * noise - weights[1] * data
    sigma = noise_levels()[time].float()
    latents = (1 - sigma) * data + sigma * noise
    diffusion = Diffusion(sigma.view(1, 1, 1, 1, 1))
    torch.testing.assert_close(diffusion.inputs(latents), sample)
    torch.testing.assert_close(diffusion.velocity(latents, prediction), noise - data)


def test_rows_of_a_batch_are_independent():
    model, arguments = installed(), inputs(3)
    with torch.no_grad():
        together = model(**arguments)
        for row in range(3):
            alone = model(**{name: value[row : row + 1] for name, value in arguments.items()})
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-5, atol=1e-5)


def test_an_adapter_has_all_matrices_of_the_blocks_and_is_saved_and_read(tmp_path, family):
    model, plain = installed(), installed()
    add_trainable_lora(model, training_config(model, rank=2, alpha=4.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.zero_()
        assert torch.equal(model(**inputs()), plain(**inputs()))
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.1)
        assert not torch.allclose(model(**inputs()), plain(**inputs()))
    assert len(current_lora(model)) == 2 * (4 + 2)  # attention and MLP of two blocks
    save_lora(current_lora(model), tmp_path, form="diffusers")
    read = read_lora(tmp_path)
    assert read.keys() == current_lora(model).keys()
    twin = tiny()
    twin.load_lora_adapter(str(tmp_path), prefix=None, use_safetensors=True)
    arguments = inputs()
    with torch.no_grad():
        torch.testing.assert_close(stock_velocity(twin, **arguments), model(**arguments))
    assert sizes_module(family.name).read(model.config, {}).lora_parameters(2) == sum(
        pair.a.numel() + pair.b.numel() for pair in read.values()
    )


def test_the_planner_counts_the_parameters_of_diffusers_class(family):
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel()
        vae = AutoencoderKLCogVideoX()
    sizes = sizes_module(family.name).released("cogvideox_2b")
    assert sizes.parameters == sum(p.numel() for p in model.parameters()) == 1_693_783_872
    targets = target_modules(model, [family.matrices])
    assert sizes.matrix_parameters == sum(
        model.get_submodule(name).weight.numel() for name in targets
    )
    assert sizes.vae_parameters == sum(p.numel() for p in vae.parameters())
    assert component_of(vae) is family.vae


def test_a_small_model_has_the_counted_parameters(family):
    model = tiny(num_layers=3)
    sizes = sizes_module(family.name).read(json.loads(json.dumps(dict(model.config))), {})
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert sizes.latent_size(49, 480, 720) == (13, 60, 90)
    with pytest.raises(ValueError, match=r"must be 8n \+ 1, .*, got 45; use 41 or 49"):
        sizes.latent_size(45, 480, 720)


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"use_rotary_positional_embeddings": True}, "use_rotary_positional_embeddings=True"),
        ({"in_channels": 32}, "in_channels=32"),
    ],
)
def test_other_models_of_the_class_are_rejected(family, settings, name):
    with pytest.raises(ValueError, match=name):
        new_model(family.transformer, thin.transformer_settings() | settings)
    assert not list(new_model(family.transformer, thin.transformer_settings()).buffers())


@pytest.mark.slow
def test_two_ranks_give_the_velocity_and_gradients_of_one():
    model = installed()
    velocity = model(**inputs())
    velocity.square().sum().backward()
    for found, gradients in launch("tests.examples.cogvideox.tiny:velocity_of_ranks", 2, 2):
        torch.testing.assert_close(
            torch.tensor(found), velocity.detach().flatten(), rtol=1e-4, atol=1e-5
        )
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                torch.tensor(gradients[name]), parameter.grad.flatten(), rtol=1e-3, atol=1e-3
            )
