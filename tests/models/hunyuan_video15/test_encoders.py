import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyvideo.data.prompts import Request
from hyvideo.models.fit_checks import check_checkpoint
from hyvideo.models.hunyuan_video15.encoders import load_text_encoder
from tests.models.checkpoint_files import VERSION, assert_same_model, rewrite


def test_the_text_encoder_is_loaded_frozen_with_its_tokenizer(root):
    from transformers import Qwen2_5_VLTextModel

    tokenizer, model = load_text_encoder(root)
    _, half = load_text_encoder(root, dtype=torch.bfloat16)
    reference = Qwen2_5_VLTextModel.from_pretrained(root / "text_encoder" / "llm")
    assert_same_model(model, reference)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert half.rotary_emb.inv_freq.dtype == torch.float32
    assert_same_model(half, reference.to(torch.bfloat16))
    assert tokenizer("ab")["input_ids"] == [tokenizer.convert_tokens_to_ids(letter) for letter in "ab"]


def test_tensor_names_of_a_full_published_checkpoint_are_supported(root_copy):
    _, before = load_text_encoder(root_copy)
    path = root_copy / "text_encoder" / "llm" / "model.safetensors"
    tensors = {f"model.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(
        tensors | {"visual.patch_embed.proj.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2, 2)},
        path,
        metadata={"format": "pt"},
    )
    assert check_checkpoint(root_copy, VERSION, [Request("a cat")]) == []
    assert_same_model(load_text_encoder(root_copy)[1], before)


def test_the_text_encoder_is_loaded_from_the_diffusers_layout(root, tmp_path):
    shutil.copytree(root / "text_encoder" / "llm", tmp_path / "text_encoder")
    (tmp_path / "tokenizer").mkdir()
    for path in (tmp_path / "text_encoder").glob("token*"):
        path.rename(tmp_path / "tokenizer" / path.name)
    tokenizer, model = load_text_encoder(tmp_path)
    assert tokenizer("a")["input_ids"] == load_text_encoder(root)[0]("a")["input_ids"]
    assert_same_model(model, load_text_encoder(root)[1])


def test_a_random_text_encoder_needs_no_weights_and_is_reproducible(root_copy):
    (root_copy / "text_encoder" / "llm" / "model.safetensors").unlink()
    _, model = load_text_encoder(root_copy, random_weights_seed=3, dtype=torch.bfloat16)
    _, repeated = load_text_encoder(root_copy, random_weights_seed=3, dtype=torch.bfloat16)
    assert_same_model(repeated, model)
    assert model.embed_tokens.weight.float().std() == pytest.approx(1, rel=0.05)
    assert model.rotary_emb.inv_freq.dtype == torch.float32
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[5, 9, 2, 44, 7]])).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda tensors: tensors.pop("layers.0.mlp.up_proj.weight"),
            "up_proj.weight' of shape .* is missing",
        ),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(3)}), r"norm.weight.*\(3,\)"),
    ],
    ids=["missing", "misshapen"],
)
def test_a_text_encoder_that_does_not_fit_raises_an_error(root_copy, change, message):
    rewrite(root_copy / "text_encoder" / "llm" / "model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        load_text_encoder(root_copy)
    assert len(check_checkpoint(root_copy, VERSION, [Request("a cat")])) == 1
