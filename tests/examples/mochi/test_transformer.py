"""The transformer of the example family Mochi against diffusers' class: velocity, gradients,
adapters, ranks and sizes.
"""

import json

import pytest
import torch

from hyvideo.models.family import family_of
from hyvideo.models.lora import add_trainable_lora, current_lora, training_config
from hyvideo.models.lora_files import read_lora
from hyvideo.models.lora_saving import save_lora
from hyvideo.models.sizes import read_sizes
from hyvideo.planning.flops import count_parameters
from tests.examples.mochi.tiny import FOLDER, inputs, installed, stock_velocity, tiny
from tests.registered import registered


@pytest.fixture(scope="module", autouse=True)
def family():
    with registered(FOLDER):
        yield family_of("MochiTransformer3DModel")


def test_every_parameter_has_a_gradient_also_the_learned_rotary_frequencies():
    model = installed()
    model(**inputs()).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert model.pos_frequencies.grad.any()


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
    # 8 attention layers and 4 of the MLPs; the last block has no output for the text
    assert len(current_lora(model)) == 12 + 9
    save_lora(current_lora(model), tmp_path, form="diffusers")
    read = read_lora(tmp_path)
    assert read.keys() == current_lora(model).keys()
    twin = tiny()
    twin.load_lora_adapter(str(tmp_path), use_safetensors=True)
    arguments = inputs()
    with torch.no_grad():
        torch.testing.assert_close(stock_velocity(twin, **arguments), model(**arguments))
    settings = {"_class_name": "MochiTransformer3DModel"} | dict(twin.config)
    counted = count_parameters(read_sizes(family.name, settings, {}))
    assert 2 * counted.per_lora_rank == sum(p.a.numel() + p.b.numel() for p in read.values())


def test_a_small_model_has_the_counted_parameters(family):
    model = tiny(num_layers=3)
    settings = json.loads(json.dumps(dict(model.config)))
    sizes = read_sizes(family.name, {"_class_name": "MochiTransformer3DModel"} | settings, {})
    assert count_parameters(sizes).total == sum(p.numel() for p in model.parameters())
    assert sizes.out_channels == 12  # although out_channels is null
    assert sizes.latent_size(79, 480, 848) == (14, 60, 106)
