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


def test_an_original_transformer_round_trips_bit_for_bit(original_transformer):
    _, state = original_transformer
    assert_same_bits(transformer_to_original(transformer_to_diffusers(state)), state)


def test_an_original_vae_round_trips_bit_for_bit(original_vae):
    _, state = original_vae
    assert_same_bits(vae_to_original(vae_to_diffusers(state)), state)


def test_a_vae_with_shortcut_convolutions_round_trips_bit_for_bit():
    state = {
        "encoder.down_blocks.1.resnets.0.conv_shortcut.weight": torch.randn(2, 2),
        "decoder.up_blocks.10.resnets.2.conv_shortcut.bias": torch.randn(2),
    }
    original = vae_to_original(state)
    assert set(original) == {
        "encoder.down.1.block.0.nin_shortcut.weight",
        "decoder.up.10.block.2.nin_shortcut.bias",
    }
    assert_same_bits(vae_to_diffusers(original), state)


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


def test_fused_refiner_rows_are_in_the_order_query_key_value():
    fused = torch.arange(6.0)
    split = transformer_to_diffusers(
        {"txt_in.individual_token_refiner.blocks.1.self_attn_qkv.bias": fused}
    )
    prefix = "context_embedder.token_refiner.refiner_blocks.1.attn"
    assert {name: tensor.tolist() for name, tensor in split.items()} == {
        f"{prefix}.to_q.bias": [0, 1],
        f"{prefix}.to_k.bias": [2, 3],
        f"{prefix}.to_v.bias": [4, 5],
    }


def test_the_halves_of_the_last_modulation_are_swapped():
    converted = transformer_to_diffusers({"final_layer.adaLN_modulation.1.bias": torch.arange(4.0)})
    assert converted["norm_out.linear.bias"].tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize(
    "convert, name",
    [
        (transformer_to_diffusers, "double_blocks.0.img_attn_r.weight"),
        (transformer_to_diffusers, "single_blocks.0.linear1.weight"),
        (transformer_to_diffusers, "double_blocks.0.img_attn_q.weight.extra"),
        (transformer_to_original, "transformer_blocks.0.attn.to_q.lora_A.default.weight"),
        (vae_to_diffusers, "encoder.up.0.block.0.conv1.conv.weight"),
        (vae_to_original, "decoder.mid_block.resnets.2.conv1.conv.weight"),
    ],
)
def test_an_unknown_name_raises_an_error_that_names_it(convert, name):
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        convert({name: torch.zeros(2)})


def test_a_refiner_without_key_weights_cannot_be_fused():
    prefix = "context_embedder.token_refiner.refiner_blocks.0.attn"
    with pytest.raises(ValueError, match=r"to_k\.bias'\] is missing"):
        transformer_to_original(
            {f"{prefix}.to_q.bias": torch.zeros(2), f"{prefix}.to_v.bias": torch.zeros(2)}
        )
