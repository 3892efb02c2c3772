"""The small test checkpoint is complete, can be sampled, and has the same weights in both
layouts.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyvideo.data.prompts import Request
from hyvideo.loading.fit_checks import check_checkpoint
from hyvideo.models.hunyuan_video15.encoders import (
    load_glyph_encoder,
    load_text_encoder,
    load_vision_encoder,
)
from hyvideo.models.loading import load_transformer, load_vae
from tests.tiny_checkpoint import diffusers_pipeline, write_diffusers, write_original

VERSIONS = ("480p_t2v", "480p_i2v_step_distilled")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_original(tmp_path_factory.mktemp("tiny") / "ckpts", VERSIONS)


@pytest.mark.system
@pytest.mark.parametrize("version", VERSIONS)
def test_both_layouts_and_the_pipeline_have_the_same_weights(root, tmp_path, version):
    pipeline = diffusers_pipeline(root, version)
    out = write_diffusers(root, version, tmp_path / "pipeline")
    request = Request('a sign says "OPEN"', None if version == "480p_t2v" else "image.png")
    assert check_checkpoint(out, None, [request]) == []
    for folder, name in ((root, version), (out, None)):
        assert_same(load_transformer(folder, name), pipeline.transformer)
        assert_same(load_vae(folder), pipeline.vae)
        assert_same(load_text_encoder(folder)[1], pipeline.text_encoder)
        assert_same(load_glyph_encoder(folder)[1], pipeline.text_encoder_2)
        if version != "480p_t2v":
            assert_same(load_vision_encoder(folder)[1], pipeline.image_encoder)
    reloaded = type(pipeline).from_pretrained(out)
    assert_same(reloaded.transformer, pipeline.transformer)
    assert (
        reloaded.scheduler.config.shift
        == {"480p_t2v": 5.0, "480p_i2v_step_distilled": 7.0}[version]
    )
    assert (
        len(reloaded.tokenizer_2) == len(reloaded.text_encoder_2.encoder.embed_tokens.weight) == 390
    )
    special = ["<color-0>", "<color-1>", "<en-font-0>", "<en-font-1>", "<cn-font-2>", "<jp-font-3>"]
    assert reloaded.tokenizer_2.convert_tokens_to_ids(special) == list(range(384, 390))


def assert_same(model, other):
    state, expected = model.state_dict(), other.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("names", [["shared"], ["shared", "encoder.embed_tokens"]])
def test_all_published_names_of_the_t5_embedding_are_supported(root, tmp_path, names):
    pipeline = diffusers_pipeline(root, "480p_t2v")
    pipeline.text_encoder_2.save_pretrained(tmp_path / "text_encoder_2")
    pipeline.tokenizer_2.save_pretrained(tmp_path / "tokenizer_2")
    path = tmp_path / "text_encoder_2" / "model.safetensors"
    tensors = load_file(path)
    table = tensors.pop("shared.weight")
    save_file(
        tensors | {f"{name}.weight": table.clone() for name in names},
        path,
        metadata={"format": "pt"},
    )
    assert_same(load_glyph_encoder(tmp_path)[1], pipeline.text_encoder_2)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="shared.weight.*is missing"):
        load_glyph_encoder(tmp_path)
