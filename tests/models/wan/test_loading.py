"""Whichever way a Wan transformer is loaded, none of its tensors is left without a value or rounded unasked."""

from dataclasses import replace

import pytest
import torch

from hyvideo.distributed.sharded_tensors import fill_shards
from hyvideo.models import loading
from hyvideo.models.family import install, stock_twin
from hyvideo.models.fit_checks import model_problems
from hyvideo.training import saved_policy
from tests.models.wan.tiny import inputs, tiny


@pytest.fixture
def root(tmp_path):
    tiny().save_pretrained(tmp_path / "transformer")
    return tmp_path


def loaded(root):
    return loading.load_transformer(root, None)


def streamed(root):
    model, weights = loading.stream_transformer(root, None)
    fill_shards(model, weights, device=torch.device("cpu"))
    return model


def overwritten(root):
    model = loading.transformer_without_memory(root, None).to_empty(device="cpu")
    loading.load_transformer_weights(model, root / "transformer")
    return model.eval()


def saved(root):
    return saved_policy.load(root, torch.float32)


def described(root):
    """As a checkpoint's policy: built from a file that describes it, and given memory."""
    saved_policy.write_model_file(loaded(root), root)
    model = loading.transformer_of(root / saved_policy.MODEL_FILE)
    model.type(torch.float32).to_empty(device="cpu")
    model.load_state_dict(loaded(root).state_dict())
    return model.eval()


@pytest.mark.parametrize("way", [loaded, streamed, overwritten, saved, described])
def test_every_way_of_loading_gives_the_same_velocity(root, way):
    model, expected = way(root), tiny()
    assert not list(model.named_buffers())
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    for each in (model, expected):
        install(each)
    with torch.no_grad():
        assert torch.equal(model(**inputs()), expected(**inputs()))


def test_a_model_of_lower_precision_has_tables_of_full_precision(root):
    model = loading.load_transformer(root, None).type(torch.bfloat16)
    twin = stock_twin(loading.load_transformer(root, None))
    install(model)
    tables = []
    model.blocks[0].register_forward_pre_hook(lambda block, given: tables.extend(given[3][:2]))
    arguments = inputs(1)
    texts = [replace(one, text=one.text.bfloat16()) for one in arguments["conditions"]]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(**arguments | {"conditions": texts})
    expected = twin.rope(arguments["latents"])
    assert all(torch.equal(ours.abs(), theirs[0, :, 0].abs()) for ours, theirs in zip(tables, expected))


def test_an_image_to_video_model_is_a_problem_of_its_folder(root):
    config = root / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"image_dim": null', '"image_dim": 1280'))
    with pytest.raises(ValueError, match="image-to-video"):
        model_problems(loading.transformer_folder(root, None))
