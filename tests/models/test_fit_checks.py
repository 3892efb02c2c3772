import json
import shutil

import pytest

from hyvideo.data.prompts import Request
from hyvideo.loading.fit_checks import check_checkpoint, version_problems
from hyvideo.models.loading import read_family, transformer_folder
from hyvideo.models.sizes import released_sizes
from hyvideo.models.versions import RELEASED
from tests.models.checkpoint_files import VERSION

REQUESTS = [Request("a cat")]


def test_all_corrupted_components_are_reported_at_once(root_copy):
    (root_copy / "vae" / "config.json").write_text("{")
    shutil.rmtree(root_copy / "text_encoder")
    transformer, vae, text_encoder = check_checkpoint(root_copy, "720p_t2v", REQUESTS)
    assert "720p_t2v" in transformer
    assert VERSION in transformer
    assert "config.json" in vae
    assert "text encoder" in text_encoder


def test_random_weights_need_only_the_configs(root_copy):
    for path in root_copy.rglob("*.safetensors"):
        path.unlink()
    assert len(check_checkpoint(root_copy, VERSION, REQUESTS)) == 3
    assert check_checkpoint(root_copy, VERSION, REQUESTS, weights_needed=False) == []


def test_a_missing_encoder_of_some_prompts_names_the_first_of_them(root_copy):
    quoted = Request('a sign says "OPEN"', place="row 2 of x.csv")
    for folder in ("byt5-small", "Glyph-SDXL-v2"):
        shutil.rmtree(root_copy / "text_encoder" / folder, ignore_errors=True)
    (problem,) = check_checkpoint(root_copy, VERSION, [*REQUESTS, quoted, Request('"NO"')])
    assert "glyph encoder" in problem and "row 2 of x.csv" in problem
    assert check_checkpoint(root_copy, VERSION, REQUESTS) == []


def write_configs(root, name, **changes):
    """Write the configs with which diffusers' pipeline of a released version is published."""
    version = RELEASED[name]
    sizes = released_sizes(name)
    config = {
        "num_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "target_size": 640,
        "use_meanflow": False,
        "in_channels": sizes.out_channels,
        "out_channels": sizes.out_channels,
        **sizes.transformer,
        **changes,
    }
    index = {"_class_name": "a pipeline"}
    folders = ["transformer"]
    if version.boundary:
        folders.append("transformer_2")
        index["boundary_ratio"] = version.boundary
    for folder in folders:
        (root / folder).mkdir(parents=True)
        (root / folder / "config.json").write_text(json.dumps(config))
    (root / "model_index.json").write_text(json.dumps(index))
    return root


def problems_as(root, version):
    return version_problems(root, version, read_family(transformer_folder(root, version)))


@pytest.mark.parametrize(
    "stored, own, other",
    [
        ("wan2.1_t2v_14b", ["wan2.1_t2v_14b"], ["wan2.1_t2v_1.3b", "wan2.2_t2v_a14b"]),
        ("wan2.1_t2v_1.3b", ["wan2.1_t2v_1.3b"], ["wan2.1_t2v_1.3b_anyflow", "wan2.2_ti2v_5b"]),
        ("wan2.2_ti2v_5b", ["wan2.2_ti2v_5b_fastwan"], ["wan2.1_t2v_14b"]),
        ("wan2.2_t2v_a14b", ["wan2.2_t2v_a14b_4step"], ["wan2.2_i2v_a14b", "wan2.1_t2v_1.3b"]),
        ("720p_t2v", ["720p_t2v", "720p_i2v_distilled"], ["480p_t2v"]),
        ("480p_i2v_step_distilled", ["480p_i2v_step_distilled"], ["480p_i2v"]),
    ],
)
def test_the_folder_of_another_released_version_is_named(tmp_path, stored, own, other):
    """--model_path Wan-AI/Wan2.1-T2V-14B-Diffusers with the transformer_version of the 1.3B model,
    which sampled with its shift 8 and guidance 6.
    """
    root = write_configs(tmp_path, stored)
    for version in own:
        assert problems_as(root, version) == []
    for version in other:
        if version.startswith("wan2.2") and "a14b" in version and stored.startswith("wan2.1"):
            (root / "transformer_2").mkdir()
            shutil.copy(root / "transformer" / "config.json", root / "transformer_2")
        (problem,) = problems_as(root, version)
        assert version in problem and f"set transformer_version to {stored}" in problem


def test_a_transformer_of_its_own_sizes_may_be_named_as_any_version(tmp_path):
    """A pruned model, and the tiny models of rehearsals."""
    root = write_configs(tmp_path, "wan2.1_t2v_14b", num_layers=7)
    assert problems_as(root, "wan2.1_t2v_1.3b") == []
