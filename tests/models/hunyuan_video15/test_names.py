import pytest
import torch

from hyvideo.models.hunyuan_video15.names import (
    transformer_to_diffusers,
    transformer_to_original,
    vae_to_diffusers,
    vae_to_original,
)
from hyvideo.models.hunyuan_video15.settings import (
    transformer_config_to_diffusers,
    vae_config_to_diffusers,
)
from tests.models.hunyuan_video15.test_settings import RELEASED_TRANSFORMER, RELEASED_VAE


def assert_same_bits(state, expected):
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def meta_state(class_name, arguments):
    import diffusers

    with torch.device("meta"):
        return getattr(diffusers, class_name)(**arguments).state_dict()


def test_an_original_vae_round_trips_bit_for_bit(original_vae):
    _, state = original_vae
    assert_same_bits(vae_to_original(vae_to_diffusers(state)), state)


def test_all_names_of_the_released_transformer_are_mapped():
    state = meta_state(
        "HunyuanVideo15Transformer3DModel", transformer_config_to_diffusers(RELEASED_TRANSFORMER)
    )
    original = transformer_to_original(state)
    assert (len(original), len(state)) == (1793, 1801)
    assert sum(tensor.numel() for tensor in state.values()) == 8_326_608_160
    assert original["img_in.proj.weight"].shape == (2048, 65, 1, 1, 1)
    assert transformer_to_diffusers(original).keys() == state.keys()


def test_all_names_of_the_released_vae_are_mapped():
    state = meta_state("AutoencoderKLHunyuanVideo15", vae_config_to_diffusers(RELEASED_VAE))
    assert len(vae_to_original(state)) == 218
    assert sum(tensor.numel() for tensor in state.values()) == 1_260_634_115
    assert vae_to_diffusers(vae_to_original(state)).keys() == state.keys()


@pytest.mark.parametrize(
    "convert, name",
    [
        (transformer_to_original, "transformer_blocks.0.attn.to_q.lora_A.default.weight"),
        (vae_to_diffusers, "encoder.up.0.block.0.conv1.conv.weight"),
    ],
)
def test_an_unknown_name_raises_an_error_that_names_it(convert, name):
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        convert({name: torch.zeros(2)})
