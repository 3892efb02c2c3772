import pytest

from hyvideo.models.hunyuan_video15.settings import (
    transformer_config_to_diffusers,
    transformer_config_to_original,
    vae_config_to_diffusers,
    vae_config_to_original,
)

RELEASED_TRANSFORMER = {
    "_class_name": "HunyuanVideo_1_5_DiffusionTransformer",
    "attn_mode": "flash",
    "attn_param": None,
    "concat_condition": True,
    "glyph_byT5_v2": True,
    "guidance_embed": False,
    "heads_num": 16,
    "hidden_size": 2048,
    "ideal_resolution": "480p",
    "ideal_task": "t2v",
    "in_channels": 32,
    "is_reshape_temporal_channels": False,
    "mlp_act_type": "gelu_tanh",
    "mlp_width_ratio": 4,
    "mm_double_blocks_depth": 54,
    "mm_single_blocks_depth": 0,
    "out_channels": 32,
    "patch_size": [1, 1, 1],
    "qk_norm": True,
    "qk_norm_type": "rms",
    "qkv_bias": True,
    "rope_dim_list": [16, 56, 56],
    "rope_theta": 256,
    "text_pool_type": None,
    "text_projection": "single_refiner",
    "text_states_dim": 3584,
    "text_states_dim_2": None,
    "use_attention_mask": True,
    "use_cond_type_embedding": True,
    "use_meanflow": False,
    "vision_projection": "linear",
    "vision_states_dim": 1152,
}
RELEASED_VAE = {
    "_class_name": "AutoencoderKLConv3D",
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 32,
    "block_out_channels": [128, 256, 512, 1024, 1024],
    "layers_per_block": 2,
    "ffactor_spatial": 16,
    "ffactor_temporal": 4,
    "sample_size": 256,
    "sample_tsize": 64,
    "scaling_factor": 1.03682,
    "shift_factor": None,
    "downsample_match_channel": True,
    "upsample_match_channel": True,
}


def test_the_released_transformer_config_maps_to_diffusers_arguments():
    assert transformer_config_to_diffusers(RELEASED_TRANSFORMER) == {
        "in_channels": 65,
        "out_channels": 32,
        "num_attention_heads": 16,
        "attention_head_dim": 128,
        "num_layers": 54,
        "num_refiner_layers": 2,
        "mlp_ratio": 4.0,
        "patch_size": 1,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "text_embed_dim": 3584,
        "text_embed_2_dim": 1472,
        "image_embed_dim": 1152,
        "rope_theta": 256.0,
        "rope_axes_dim": (16, 56, 56),
        "target_size": 640,
        "task_type": "t2v",
        "use_meanflow": False,
    }


def test_variants_of_the_transformer_config_are_supported():
    variant = {
        "ideal_resolution": "720p",
        "ideal_task": "i2v",
        "refiner_depth": 3,
        "use_meanflow": True,
    }
    arguments = transformer_config_to_diffusers(
        RELEASED_TRANSFORMER | variant | {"patch_size": [2, 4, 4]}
    )
    assert arguments["target_size"] == 960
    assert arguments["task_type"] == "i2v"
    assert arguments["num_refiner_layers"] == 3
    assert arguments["use_meanflow"] is True
    assert (arguments["patch_size_t"], arguments["patch_size"]) == (2, 4)
    plain = transformer_config_to_diffusers(RELEASED_TRANSFORMER | {"concat_condition": False})
    assert plain["in_channels"] == 32


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"refiner_depth": 1, "mlp_width_ratio": 2, "ideal_resolution": "720p", "ideal_task": "i2v"},
        {"concat_condition": False, "use_meanflow": True, "patch_size": [1, 2, 2]},
    ],
)
def test_a_transformer_config_round_trips(variant):
    arguments = transformer_config_to_diffusers(RELEASED_TRANSFORMER | variant)
    assert transformer_config_to_diffusers(transformer_config_to_original(arguments)) == arguments


def test_released_configs_round_trip_unchanged():
    back = transformer_config_to_original(transformer_config_to_diffusers(RELEASED_TRANSFORMER))
    assert back == RELEASED_TRANSFORMER
    assert vae_config_to_original(vae_config_to_diffusers(RELEASED_VAE)) == RELEASED_VAE


def test_a_transformer_config_that_diffusers_cannot_represent_raises_an_error():
    with pytest.raises(ValueError, match="guidance_embed"):
        transformer_config_to_diffusers(RELEASED_TRANSFORMER | {"guidance_embed": True})


def test_a_vae_config_that_diffusers_cannot_represent_raises_an_error():
    with pytest.raises(ValueError, match="shift_factor"):
        vae_config_to_diffusers(RELEASED_VAE | {"shift_factor": 0.1})
