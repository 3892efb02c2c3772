"""Sizes of Wan are read from configs of both layouts; the planner predicts a block's memory."""

import json
from dataclasses import replace

import pytest

from hyvideo.models.sizes import read_architecture, released_sizes
from hyvideo.planning import activations
from hyvideo.planning.flops import count_parameters
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.config import Config
from tests.fake_cuda.counting import counted as counted_by
from tests.models.wan.tiny import tiny
from tests.planning.simulated import with_layers

VERSIONS = ["wan2.1_t2v_1.3b", "wan2.1_t2v_14b", "wan2.2_ti2v_5b"]
VERSION = pytest.mark.parametrize("version", VERSIONS)
KIND = pytest.mark.parametrize("kind", ["all", "lora"])


@pytest.mark.parametrize(
    "version, size, tokens",
    [
        ("wan2.1_t2v_1.3b", (81, 480, 832), 32_760),
        ("wan2.1_t2v_14b", (81, 720, 1280), 75_600),
        ("wan2.2_ti2v_5b", (121, 704, 1280), 27_280),
    ],
)
def test_number_of_tokens_of_a_video(version, size, tokens):
    assert released_sizes(version).image_tokens(*size) == tokens


def test_an_unsupported_video_size_raises_an_error():
    with pytest.raises(ValueError, match="height must be a multiple of 32, got 720"):
        released_sizes("wan2.2_ti2v_5b").image_tokens(121, 720, 1280)


def test_a_transformer_of_wan22_has_its_vae_also_without_a_config(tmp_path):
    tiny(in_channels=48, out_channels=48).save_config(tmp_path / "transformer")
    sizes = read_architecture(tmp_path, "anything")
    assert sizes.spatial_compression_ratio == 16
    assert sizes.decoding == released_sizes("wan2.2_ti2v_5b").decoding
    (tmp_path / "vae").mkdir()
    vae = {"_class_name": "AutoencoderKLWan", "scale_factor_spatial": 4}
    (tmp_path / "vae" / "config.json").write_text(json.dumps(vae))
    assert read_architecture(tmp_path, "anything").spatial_compression_ratio == 4


def test_an_original_config_is_read(tmp_path):
    folder = tmp_path / "transformer" / "mine"
    folder.mkdir(parents=True)
    sizes = {
        "dim": 1536,
        "ffn_dim": 8960,
        "freq_dim": 256,
        "num_heads": 12,
        "num_layers": 30,
        "eps": 1e-6,
    }
    config = sizes | {
        "_class_name": "WanModel",
        "model_type": "t2v",
        "in_dim": 16,
        "out_dim": 16,
        "text_len": 512,
    }
    (folder / "config.json").write_text(json.dumps(config))
    sizes, released = read_architecture(tmp_path, "mine"), released_sizes("wan2.1_t2v_1.3b")
    assert count_parameters(sizes) == count_parameters(released)
    assert sizes.image_tokens(81, 480, 832) == released.image_tokens(81, 480, 832)


@pytest.fixture(scope="module")
def counted():
    """Counted bytes of the forward pass, saved after it, and of the backward pass, by version and
    kind of training.
    """
    return counted_by("tests.models.wan.counted_block")


def one_block(version, kind, **settings):
    """Plan a run with one block on one GPU, 81 frames of 480 x 832, with the VAE of Wan2.1 for all
    versions.
    """
    sizes = {
        "sample_n_frames": 81,
        "height": 480,
        "width": 832,
        "reward_model": [],
        "cfg_scale": 1.0,
        "shift": 5.0,
    }
    counts = {"batch_size": 1, "num_generations": 1}
    recompute = {"activation_checkpointing": "full", "lora_rank": 32 if kind == "lora" else 0}
    config = Config().with_settings(**(sizes | counts | recompute | settings)).resolved()
    sizes = replace(released_sizes(version), spatial_compression_ratio=8)
    return with_layers(PlannedRun(config, 1, sizes), 1)


def bytes_of_input(version):
    return 32_760 * released_sizes(version).width * 2


@pytest.mark.slow
@VERSION
def test_predicted_activation_memory_matches_the_counted_bytes(counted, version):
    kept = activations.kept_bytes(one_block(version, "all", activation_checkpointing="none"))
    assert kept == pytest.approx(counted[f"{version} all trained"]["kept"], rel=0.01)


@pytest.mark.slow
@VERSION
@KIND
def test_predicted_inference_memory_matches_the_counted_bytes(counted, version, kind):
    held = counted[f"{version} {kind} sampled"]["forward"] + bytes_of_input(version)
    assert activations.inference_bytes(one_block(version, kind), 1) == pytest.approx(held, rel=0.06)


@pytest.mark.slow
@VERSION
@KIND
def test_predicted_backward_memory_matches_the_counted_bytes(counted, version, kind):
    run = one_block(version, kind)
    weights = 2 * (32 * run.parameters.per_lora_rank if kind == "lora" else run.parameters.block)
    held = counted[f"{version} {kind} recomputed"]["backward"] + bytes_of_input(version) - weights
    assert activations.block_bytes(run) == pytest.approx(held, rel=0.04)


def test_selective_checkpointing_saves_the_outputs_of_both_attentions():
    full, selective = (
        one_block("wan2.1_t2v_1.3b", "all", activation_checkpointing=kind)
        for kind in ("full", "selective")
    )
    assert activations.kept_bytes(selective) == 3 * activations.kept_bytes(full)
