"""Parameters and FLOPs, counted on models without weights, against closed forms and real models."""

import json
from dataclasses import replace

import pytest

from hyvideo.models.lora import training_config
from hyvideo.models.registry import register
from hyvideo.models.sizes import read_architecture, released_sizes
from hyvideo.planning.flops import count_decoding, count_flops, count_parameters
from tests.forked import ROOT
from tests.models.wan.tiny import tiny

SIZE = (81, 352, 624)


@pytest.mark.parametrize(
    "version, parameters, is_flow_map",
    [
        ("480p_t2v", 8_326_608_160, False),
        ("480p_i2v_step_distilled", 8_331_330_848, True),
        ("wan2.1_t2v_1.3b", 1_418_996_800, False),
        ("wan2.1_t2v_14b", 14_288_491_584, False),
        ("wan2.2_ti2v_5b", 4_999_787_712, False),
    ],
)
def test_the_released_models_have_the_published_number_of_parameters(
    version, parameters, is_flow_map
):
    counted = count_parameters(released_sizes(version))
    assert (counted.total, counted.is_flow_map) == (parameters, is_flow_map)


def test_flops_of_hunyuan_video_are_those_of_its_matrices_and_attention():
    """Each block has 4 d^2 + 2 (4 d) d parameters per token in matrices, for image and text."""
    sizes = released_sizes("480p_t2v")
    tokens = sizes.image_tokens(*SIZE) + 300
    found = count_flops(sizes, SIZE, 300)
    assert found.attention == pytest.approx(4 * tokens**2 * 2048 * 54, rel=1e-3)  # and refiner
    assert found.products == pytest.approx(2 * 12 * 2048**2 * tokens * 54, rel=2e-3)


def test_flops_of_wan_are_those_of_its_matrices_and_both_attentions():
    """Keys and values of the text and of one padding token are the only products of the text;
    attention has 512 of them.
    """
    sizes = released_sizes("wan2.1_t2v_1.3b")
    tokens = sizes.image_tokens(*SIZE)
    width, hidden, layers = 1536, 8960, 30
    found = count_flops(sizes, SIZE, 300)
    assert found.attention == 4 * layers * width * tokens * (tokens + 512)
    rows = 300 + 1
    blocks = (6 * width**2 + 2 * width * hidden) * tokens + 2 * width**2 * rows
    ends = 2 * 16 * 4 * width * tokens
    embedders = (4096 + width) * width * rows + (256 + width) * width + 6 * width**2
    assert found.products == 2 * (layers * blocks + ends + embedders)
    assert count_flops(sizes, SIZE, 500).attention == found.attention


def test_counts_of_a_small_model_are_extrapolated_from_two_blocks():
    sizes = read_architecture(ROOT / "assets" / "miniature_wan", "miniature")
    two, three, four = (
        count_flops(
            replace(sizes, num_layers=n, transformer={**sizes.transformer, "num_layers": n}),
            (9, 32, 32),
            7,
        ).total
        for n in (2, 3, 4)
    )
    assert four - three == three - two > 0


@pytest.mark.parametrize(
    "version, decode, vae",
    [
        ("480p_t2v", 25.1e6, 1_260_634_115),
        ("wan2.1_t2v_1.3b", 8.5e6, 126_892_531),
    ],
)
def test_decoding_is_counted_in_a_tile(version, decode, vae):
    """The numbers of 81 or 121 whole frames, counted by torch."""
    sizes = released_sizes(version)
    assert count_decoding(sizes) == pytest.approx(decode, rel=0.02)
    assert count_parameters(sizes).vae == vae


def test_parameters_of_a_lora_are_those_of_its_targets(tmp_path):
    model = tiny()
    model.save_config(tmp_path / "transformer")
    sizes = read_architecture(tmp_path, "anything")
    names = training_config(model, rank=5, alpha=5).target_modules.replace("\\", "").split("|")
    linears = [model.get_submodule(name) for name in names]
    counted = count_parameters(sizes)
    assert counted.per_lora_rank == sum(each.in_features + each.out_features for each in linears)
    assert counted.matrices == sum(each.weight.numel() for each in linears)
    some = count_parameters(sizes, (r"attn1\.to_q",))
    assert some.per_lora_rank == 2 * sizes.width * sizes.num_layers


def test_a_family_from_outside_is_counted_without_formulas():
    register(str(ROOT / "examples/mochi"))
    sizes = released_sizes("mochi1")
    assert (sizes.patch, sizes.spatial_compression_ratio) == ((1, 2, 2), 8)
    assert sizes.image_tokens(79, 480, 848) == 22_260
    assert count_parameters(sizes).total == 10_027_677_744
    tokens = 22_260 + 256
    attention = 4 * tokens**2 * 3072 * 48
    assert count_flops(sizes, (79, 480, 848), 256).attention == pytest.approx(attention, rel=1e-3)
    assert json.loads(json.dumps(sizes.transformer)) == {"_class_name": "MochiTransformer3DModel"}
