"""Tests that counts of parameters and FLOPs match the classes, and that the planner predicts a
block's memory.
"""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hyvideo.models.lora import training_config
from hyvideo.models.sizes import read_architecture
from hyvideo.models.wan.sizes import Architecture, read, released
from hyvideo.planning import activations
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.config import Config
from tests.fake_cuda.counting import counted as counted_by
from tests.models.wan.tiny import SIZES, inputs, tiny
from tests.stock_models import stock_inputs, stock_twin

VERSIONS = {
    "wan2.1_t2v_1.3b": 1_418_996_800,
    "wan2.1_t2v_14b": 14_288_491_584,
    "wan2.2_ti2v_5b": 4_999_787_712,
}
WAN22_VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "is_residual": True,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
}
VERSION = pytest.mark.parametrize("version", VERSIONS)
KIND = pytest.mark.parametrize("kind", ["all", "lora"])


@pytest.mark.parametrize("version, parameters", VERSIONS.items())
def test_the_released_models_have_the_published_number_of_parameters(version, parameters):
    assert read_architecture("nowhere", version).parameters == parameters
    assert read_architecture("nowhere", version).is_released


@pytest.mark.parametrize("sizes", [{}, {"patch_size": (1, 1, 1), "num_layers": 3}])
def test_parameters_and_flops_of_a_small_model_match_its_class(sizes):
    model, arch = tiny(**sizes), read(SIZES | sizes | {"_class_name": "WanTransformer3DModel"}, {})
    assert arch.parameters == sum(p.numel() for p in model.parameters())
    assert arch.num_layers * arch.block_parameters == sum(
        p.numel() for p in model.blocks.parameters()
    )
    assert arch.root_parameters == arch.parameters - arch.num_layers * arch.block_parameters
    arguments = inputs(1, (3, 6, 4))
    # torch does not count the FLOPs of the CPU's attention kernel.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        stock_twin(model)(**stock_inputs(model, **arguments))
    assert arch.forward(arch.image_tokens(9, 48, 32), 7).total == counter.get_total_flops()


def test_lora_and_matrix_parameters_match_the_default_targets(tmp_path):
    model = tiny()
    names = training_config(model, rank=5, alpha=5).target_modules.replace("\\", "").split("|")
    linears = [model.get_submodule(name) for name in names]
    model.save_config(tmp_path / "transformer")
    arch = read_architecture(tmp_path, "anything")
    assert arch.lora_parameters(5) == sum(
        5 * (linear.in_features + linear.out_features) for linear in linears
    )
    assert arch.matrix_parameters == sum(linear.weight.numel() for linear in linears)


@pytest.mark.parametrize(
    "version, size, tokens",
    [
        ("wan2.1_t2v_1.3b", (81, 480, 832), 32_760),
        ("wan2.1_t2v_14b", (81, 720, 1280), 75_600),
        ("wan2.2_ti2v_5b", (121, 704, 1280), 27_280),
    ],
)
def test_number_of_tokens_of_a_video(version, size, tokens):
    assert released(version).image_tokens(*size) == tokens


def test_flops_of_the_released_model_and_of_its_text():
    forward = released("wan2.1_t2v_1.3b").forward(32_760, 7)
    assert forward.total == pytest.approx(0.283e15, rel=1e-3)
    assert forward == released("wan2.1_t2v_1.3b").forward(32_760, 500)  # texts are padded
    assert 0 < forward.text < 0.001 * forward.total
    assert released("wan2.1_t2v_1.3b").block_text_tokens(300) == 0


def test_an_unsupported_video_size_raises_an_error():
    with pytest.raises(ValueError, match="width must be a multiple of 16, got 848.5"):
        Architecture().image_tokens(81, 480, 848.5)
    with pytest.raises(ValueError, match="height must be a multiple of 32, got 720"):
        released("wan2.2_ti2v_5b").image_tokens(121, 720, 1280)


def test_an_unsupported_version_raises_an_error_with_the_reason():
    with pytest.raises(ValueError, match="wan2.1_i2v_14b_480p is not supported: .*image-to-video"):
        read_architecture("nowhere", "wan2.1_i2v_14b_480p")
    with pytest.raises(ValueError, match="two transformers"):
        read_architecture("nowhere", "wan2.2_t2v_a14b")


def test_vae_sizes_are_read_from_the_folder(tmp_path):
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(
        json.dumps({"_class_name": "AutoencoderKLWan", "base_dim": 48})
    )
    tiny().save_config(tmp_path / "transformer")
    arch, full = read_architecture(tmp_path, "anything"), released("wan2.1_t2v_1.3b")
    assert (
        arch.vae_parameters == full.vae_parameters / 4
        and arch.decode_flops == full.decode_flops / 4
    )
    assert arch.decoding_values(2, 81, 480, 832) == full.decoding_values(1, 81, 480, 832)
    assert not arch.is_released
    for version, config in (("wan2.1_t2v_1.3b", {}), ("wan2.2_ti2v_5b", WAN22_VAE)):
        described = read(vars(released(version)) | {"_class_name": "WanTransformer3DModel"}, config)
        assert described == released(version)


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
    assert read_architecture(tmp_path, "mine") == released("wan2.1_t2v_1.3b")


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
    counts = {"batch_size": 1, "num_generations": 1, "enable_gradient_checkpointing": True}
    recompute = {"activation_checkpointing": "full", "lora_rank": 32 if kind == "lora" else 0}
    config = Config().with_settings(**(sizes | counts | recompute | settings)).resolved()
    return PlannedRun(
        config, 1, replace(released(version), num_layers=1, spatial_compression_ratio=8)
    )


def bytes_of_input(version):
    return 32_760 * released(version).width * 2


@pytest.mark.slow
@VERSION
def test_predicted_activation_memory_matches_the_counted_bytes(counted, version):
    kept = activations.kept_bytes(one_block(version, "all", enable_gradient_checkpointing=False))
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
    weights = 2 * (
        run.architecture.lora_parameters(32)
        if kind == "lora"
        else run.architecture.block_parameters
    )
    held = counted[f"{version} {kind} recomputed"]["backward"] + bytes_of_input(version) - weights
    assert activations.block_bytes(run) == pytest.approx(held, rel=0.04)


@pytest.mark.slow
def test_a_training_step_does_not_synchronize_with_the_gpu(counted):
    assert counted["waits"] == {}


def test_selective_checkpointing_saves_the_outputs_of_both_attentions():
    full, selective = (
        one_block("wan2.1_t2v_1.3b", "all", activation_checkpointing=kind)
        for kind in ("full", "selective")
    )
    assert activations.kept_bytes(selective) == 3 * activations.kept_bytes(full)
