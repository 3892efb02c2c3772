import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyvideo.data.prompts import Request
from hyvideo.files.digests import digest_of, digest_weights
from hyvideo.loading.fit_checks import check_checkpoint
from hyvideo.loading.model_setup import load_encoder
from hyvideo.models.hunyuan_video15.encoders import load_text_encoder
from hyvideo.models.hunyuan_video15.family import FAMILY
from hyvideo.models.hunyuan_video15.prompt_encoders import TextEncoder
from hyvideo.models.placement import Placements
from hyvideo.settings.command_line import load_config
from hyvideo.settings.config import Config
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
    assert tokenizer("ab")["input_ids"] == [
        tokenizer.convert_tokens_to_ids(letter) for letter in "ab"
    ]


def test_tensor_names_of_a_full_published_checkpoint_are_supported(root_copy):
    _, before = load_text_encoder(root_copy)
    path = root_copy / "text_encoder" / "llm" / "model.safetensors"
    tensors = {f"model.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(
        tensors
        | {
            "visual.patch_embed.proj.weight": torch.zeros(2, 2),
            "lm_head.weight": torch.zeros(2, 2),
        },
        path,
        metadata={"format": "pt"},
    )
    assert check_checkpoint(root_copy, VERSION, [Request("a cat")]) == []
    assert_same_model(load_text_encoder(root_copy)[1], before)


def test_a_random_text_encoder_needs_no_weights_and_is_reproducible(root_copy):
    (root_copy / "text_encoder" / "llm" / "model.safetensors").unlink()
    _, model = load_text_encoder(root_copy, random_weights_seed=3, dtype=torch.bfloat16)
    _, repeated = load_text_encoder(root_copy, random_weights_seed=3, dtype=torch.bfloat16)
    assert_same_model(repeated, model)
    assert model.embed_tokens.weight.float().std() == pytest.approx(1, rel=0.05)
    assert model.rotary_emb.inv_freq.dtype == torch.float32
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[5, 9, 2, 44, 7]])).last_hidden_state.isfinite().all()


def test_a_text_encoder_that_does_not_fit_raises_an_error(root_copy):
    tensor = "layers.0.mlp.up_proj.weight"
    file = root_copy / "text_encoder" / "llm" / "model.safetensors"
    rewrite(file, lambda tensors: tensors.pop(tensor))
    with pytest.raises(ValueError, match=tensor):
        load_text_encoder(root_copy)
    assert len(check_checkpoint(root_copy, VERSION, [Request("a cat")])) == 1


# --- rotary frequencies ------------------------------------------------------------------------

MINIATURE_LLM = Path("assets/miniature/text_encoder/llm")
PROMPT = "a red circle moves up, then a blue square moves left slowly and stops; " * 8
CPU = torch.device("cpu")


@pytest.fixture
def wide_heads(root_copy):
    """The checkpoint with a language model of Qwen2.5-VL's head dimension, theta and sections of
    the frequencies.
    """
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    folder = root_copy / "text_encoder" / "llm"
    shutil.rmtree(folder)
    shutil.copytree(MINIATURE_LLM, folder)
    config = Qwen2_5_VLTextConfig.from_pretrained(
        MINIATURE_LLM,
        hidden_size=256,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        initializer_range=0.08,
    )
    torch.manual_seed(0)
    Qwen2_5_VLTextModel(config).save_pretrained(folder)
    return root_copy


def whole_model_in_float16(root):
    """Return the states of PROMPT from transformers' model after ``to(float16)``, as the original's
    loader does it.
    """
    from transformers import Qwen2_5_VLTextModel

    model = Qwen2_5_VLTextModel.from_pretrained(root / "text_encoder" / "llm", dtype=torch.float32)
    model = model.to(torch.float16).eval()
    assert model.rotary_emb.inv_freq.dtype == torch.float16
    tokens = TextEncoder(*load_text_encoder(MINIATURE_LLM.parents[1]))
    with torch.no_grad():
        ids = torch.tensor([tokens._token_ids(PROMPT)])
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return states[-3][0, tokens.crop_start :]


def encoder_of(root, way="none", **settings):
    settings = {"transformer_version": VERSION, "dtype": "fp32"} | settings
    config = Config().with_settings(pretrained_model_root=str(root), **settings).resolved()
    return load_encoder(config, CPU, Placements.of_sampling(way))[0]


def states_of(encoder):
    return encoder([Request(PROMPT)]).samples[0].text.float()


@pytest.mark.parametrize("way", ["none", "group"])
def test_an_fp16_text_encoder_has_fp16_rotary_frequencies_as_in_the_original(wide_heads, way):
    """Float32 frequencies, with which no released transformer was trained, give other states."""
    expected = whole_model_in_float16(wide_heads).float()
    found = states_of(encoder_of(wide_heads, way))
    exact = TextEncoder(*load_text_encoder(wide_heads, dtype=torch.float16))([PROMPT])[0].float()
    assert len(expected) > 100
    assert torch.equal(found, expected)
    assert (exact - expected).norm() > 1e-3 * expected.norm()


def test_a_bf16_text_encoder_has_float32_rotary_frequencies(wide_heads):
    expected = TextEncoder(*load_text_encoder(wide_heads, dtype=torch.bfloat16))([PROMPT])[0]
    assert torch.equal(states_of(encoder_of(wide_heads, encoder_dtype="bf16")), expected.float())


def identity_of(root, encoder_dtype, vae_dtype, rotary_dtype):
    weights = digest_weights([root / folder for folder in FAMILY.folders])
    return digest_of(weights, encoder_dtype, vae_dtype, False, str(rotary_dtype))


def test_the_miniature_has_float32_rotary_frequencies_and_its_identity():
    """Its transformer was trained with the states of such an encoder."""
    config = load_config("configs/miniature.yaml")
    root = Path(config.model.pretrained_model_root)
    encoder, _ = load_encoder(config, CPU)
    expected = TextEncoder(*load_text_encoder(root, dtype=torch.float16))([PROMPT])[0]
    assert config.model.encoder_dtype == "fp16"
    assert torch.equal(encoder([Request(PROMPT)]).samples[0].text, expected.to(encoder.dtype))
    assert encoder.identity == identity_of(root, "fp16", config.model.vae_dtype, torch.float32)


def test_conditions_with_other_rotary_frequencies_have_another_identity(root):
    identity = encoder_of(root, encoder_dtype="fp16", vae_dtype="fp32").identity
    assert identity == identity_of(root, "fp16", "fp32", torch.float16)
    assert identity != identity_of(root, "fp16", "fp32", torch.float32)
