import copy
from pathlib import Path

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from safetensors.torch import load_file

from hyvideo.models import attention
from hyvideo.models.attention import causal_mask, freeze_dead_parameters, install, text_is_full

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {
    "t2v_plain": ((9, 17), (0, 0)),
    "t2v_quoted": ((9, 17), (5, 12)),
    "i2v_mixed": ((20, 11), (0, 7)),
}
# All relative to the largest value. The golden outputs come from another machine: at timestep 992 the
# rounding of the embedding's float32 frequencies is an angle of 6e-5; alone it moves the output by 4.5e-6.
GOLDEN_TOLERANCE = 8e-6
OUTPUT_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-5
REFINER_KEY_BIAS = tuple(f"refiner_blocks.{i}.attn.to_k.bias" for i in range(2))


def trimmed(inputs):
    """The inputs without what no sample of the batch needs."""
    inputs = dict(inputs)
    for text, mask in (
        ("encoder_hidden_states", "encoder_attention_mask"),
        ("encoder_hidden_states_2", "encoder_attention_mask_2"),
    ):
        longest = int(inputs[mask].sum(1).max())
        inputs[text], inputs[mask] = inputs[text][:, :longest], inputs[mask][:, :longest]
    if not inputs["image_embeds"].any():
        inputs["image_embeds"] = inputs["image_embeds"][:, :0]
    return inputs


def sample(inputs, index):
    return {name: tensor[index : index + 1] for name, tensor in inputs.items()}


def with_our_processor(transformer):
    transformer = copy.deepcopy(transformer)
    install(transformer)
    return transformer


def forward(transformer, inputs):
    return transformer(**inputs, return_dict=False)[0]


def gradients(transformer, inputs, *, full=None):
    """Gradients of a projection of the output, by parameter; the backward pass runs outside text_is_full."""
    if full is None:
        out = forward(transformer, inputs)
    else:
        with text_is_full(transformer, full):
            out = forward(transformer, inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * weights).sum().backward()
    return {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}


def assert_close_relative(actual, expected, tolerance):
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        # A softmax does not feel its keys shifted: this gradient is zero, and what is there is rounding.
        if not name.endswith(REFINER_KEY_BIAS):
            assert (actual[name] - gradient).abs().max() <= GRADIENT_TOLERANCE * gradient.abs().max(), name


@pytest.fixture
def masks_seen(monkeypatch):
    """Collects the mask of every attention call."""
    seen = []
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda joint, mask: seen.append(mask) or attend(joint, mask))
    return seen


# --- against the original program --------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cut", [False, True], ids=["padded", "trimmed"])
def test_a_batch_of_unequal_texts_gives_the_original_output(transformer, golden_inputs, case, cut):
    expected = load_file(GOLDEN / "transformer.safetensors")[case]
    inputs = golden_inputs(case, *CASES[case])
    install(transformer)
    with torch.no_grad():
        out = forward(transformer, trimmed(inputs) if cut else inputs)
    assert_close_relative(out, expected, GOLDEN_TOLERANCE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("index", [0, 1])
def test_a_full_text_without_any_mask_gives_the_original_output(transformer, golden_inputs, masks_seen, case, index):
    expected = load_file(GOLDEN / "transformer.safetensors")[case][index]
    inputs = trimmed(sample(golden_inputs(case, *CASES[case]), index))
    install(transformer)
    with torch.no_grad(), text_is_full(transformer, True):
        out = forward(transformer, inputs)[0]
    assert_close_relative(out, expected, GOLDEN_TOLERANCE)
    assert masks_seen == [None] * len(transformer.transformer_blocks)


# --- against diffusers' processor --------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_key_mask_gives_the_output_and_gradients_of_diffusers_dense_mask(transformer, golden_inputs, case):
    inputs = golden_inputs(case, *CASES[case])
    ours = with_our_processor(transformer)
    assert_close_relative(forward(ours, inputs), forward(transformer, inputs), OUTPUT_TOLERANCE)
    assert_same_gradients(gradients(ours, inputs), gradients(transformer, inputs))


@pytest.mark.parametrize("case", ["t2v_plain", "i2v_mixed"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
def test_trimmed_text_without_mask_has_diffusers_gradients(transformer, golden_inputs, case, checkpointed):
    inputs = sample(golden_inputs(case, *CASES[case]), 1)
    ours = with_our_processor(transformer)
    if checkpointed:
        ours.enable_gradient_checkpointing()
    assert_same_gradients(gradients(ours, trimmed(inputs), full=True), gradients(transformer, inputs))


def test_a_group_of_one_prompt_is_a_full_batch(transformer, golden_inputs):
    inputs = golden_inputs("t2v_quoted", (9, 9), (5, 5))
    ours = with_our_processor(transformer)
    with torch.no_grad(), text_is_full(ours, True):
        out = forward(ours, trimmed(inputs))
    assert_close_relative(out, forward(transformer, inputs).detach(), OUTPUT_TOLERANCE)


# --- the mask and the word about it ------------------------------------------------------------


def test_the_mask_hides_padded_keys_from_every_query(transformer, golden_inputs, masks_seen):
    install(transformer)
    with torch.no_grad():
        forward(transformer, trimmed(golden_inputs("t2v_plain", (9, 17), (0, 0))))
    valid = torch.ones(2, 60 + 17, dtype=torch.bool)
    valid[0, 60 + 9 :] = False
    assert len(masks_seen) == 3
    for mask in masks_seen:
        assert mask.shape == (2, 1, 1, 77)
        assert torch.equal(mask[:, 0, 0], valid)


def test_a_recomputed_block_still_knows_that_its_text_is_full(transformer, golden_inputs, masks_seen):
    inputs = trimmed(sample(golden_inputs("t2v_plain", (9, 17), (0, 0)), 0))
    install(transformer)
    transformer.enable_gradient_checkpointing()
    gradients(transformer, inputs, full=True)
    assert not transformer.rope.text_is_full
    assert masks_seen == [None] * 6


def test_text_counts_as_padded_outside_the_promise_and_after_an_error(transformer, golden_inputs, masks_seen):
    inputs = trimmed(sample(golden_inputs("t2v_plain", (9, 17), (0, 0)), 0))
    install(transformer)
    with pytest.raises(RuntimeError, match="stop"), text_is_full(transformer, True):
        raise RuntimeError("stop")
    with text_is_full(transformer, True), text_is_full(transformer, False), torch.no_grad():
        forward(transformer, inputs)
    with torch.no_grad():
        forward(transformer, inputs)
    assert [mask.shape for mask in masks_seen] == [(1, 1, 1, 69)] * 6


def test_a_false_promise_about_the_text_is_caught_on_the_cpu(transformer, golden_inputs):
    install(transformer)
    with pytest.raises(AssertionError, match="padded text"), text_is_full(transformer, True):
        forward(transformer, golden_inputs("t2v_plain", (9, 17), (0, 0)))


def test_a_promise_needs_an_installed_processor(transformer):
    with pytest.raises(ValueError, match="install"), text_is_full(transformer, True):
        pass


def test_installing_twice_is_installing_once(transformer, golden_inputs):
    inputs = golden_inputs("t2v_plain", (9, 17), (0, 0))
    install(transformer)
    with torch.no_grad():
        once = forward(transformer, inputs)
        install(transformer)
        assert torch.equal(forward(transformer, inputs), once)


def test_the_refiner_keeps_its_own_processor(transformer):
    refiner = transformer.context_embedder.token_refiner.refiner_blocks[0].attn
    before = refiner.processor
    install(transformer)
    assert refiner.processor is before
    assert isinstance(transformer.transformer_blocks[0].attn.processor, attention.TrimmedTextAttnProcessor)


def test_under_autocast_the_output_stays_near_float32(transformer, golden_inputs):
    inputs = trimmed(sample(golden_inputs("t2v_plain", (9, 17), (0, 0)), 0))
    install(transformer.to(torch.bfloat16))
    with torch.no_grad(), text_is_full(transformer, True):
        reference = forward(transformer.float(), inputs)
        bfloat16 = {name: x if name == "timestep" else x.to(torch.bfloat16) for name, x in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(transformer.to(torch.bfloat16), bfloat16)
    assert_close_relative(out.float(), reference, 0.05)


def test_under_autocast_queries_and_keys_are_rounded_before_attention(transformer):
    attn = transformer.transformer_blocks[0].attn
    tables = transformer.rope(torch.zeros(1, 9, 3, 4, 5))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        image = attention.project_image(attn, torch.randn(1, 60, 64), tables)
        text = attention.project_text(attn, torch.randn(1, 7, 64))
    assert {tensor.dtype for tensor in (*image, *text)} == {torch.bfloat16}


# --- parameters that nothing reads -------------------------------------------------------------


def test_exactly_the_parameters_without_gradient_are_frozen(transformer, golden_inputs):
    inputs = golden_inputs("i2v_mixed", (20, 11), (0, 7))
    install(transformer)
    trained = set(gradients(transformer, inputs))
    dead = freeze_dead_parameters(transformer)
    assert set(dead) == {name for name, _ in transformer.named_parameters()} - trained
    assert {name for name, p in transformer.named_parameters() if not p.requires_grad} == set(dead)
    assert len(dead) == 6


# --- the VAE's mask ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cached_mask_is_the_one_that_diffusers_fills_row_by_row(dtype):
    device = torch.device("cpu")
    expected = HunyuanVideo15AttnBlock.prepare_causal_attention_mask(3, 4, dtype, device)
    mask = causal_mask(3, 4, dtype, device)
    assert mask.dtype == dtype
    assert torch.equal(mask, expected)
    assert causal_mask(3, 4, dtype, device) is mask


def test_a_mask_made_in_inference_mode_serves_a_backward_pass():
    causal_mask.cache_clear()
    with torch.inference_mode():
        mask = causal_mask(2, 3, torch.float32, torch.device("cpu"))
    assert not mask.is_inference()
