import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hyvideo.models.conditions import Condition, ImageCondition
from hyvideo.models.family import freeze_unused_parameters, install
from hyvideo.models.loading import load_transformer
from tests.models.conftest import transformer_weight, write_model

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = {
    "t2v_plain": ((9, 17), (0, 0)),
    "t2v_quoted": ((9, 17), (5, 12)),
    "i2v_mixed": ((20, 11), (0, 7)),
}
# Tolerances are relative to the largest value. The golden outputs come from another machine: at
# timestep 992 the rounding of the embedding's float32 frequencies is an angle of 6e-5, which alone
# changes the output by 4.5e-6.
GOLDEN_TOLERANCE = 8e-6
OUTPUT_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-5
REFINER_KEY_BIAS = tuple(f"refiner_blocks.{i}.attn.to_k.bias" for i in range(2))


def installed(transformer):
    transformer = copy.deepcopy(transformer)
    install(transformer)
    return transformer


def trimmed(inputs):
    """Convert inputs of diffusers' forward pass to this project's: latents alone, and each sample's
    valid tokens.
    """

    def valid(states, mask):
        return [states[row, : int(mask[row].sum())] for row in range(len(states))]

    image, latents, frame = inputs["image_embeds"], *inputs["hidden_states"][:, :8].split(4, dim=1)
    texts = valid(inputs["encoder_hidden_states"], inputs["encoder_attention_mask"])
    glyphs = valid(inputs["encoder_hidden_states_2"], inputs["encoder_attention_mask_2"])
    images = (
        [ImageCondition(*pair) for pair in zip(image, frame[:, :, 0])]
        if image.any()
        else [None] * len(texts)
    )
    rows = zip(texts, glyphs, images)
    conditions = [
        Condition(text, glyph if len(glyph) else None, picture) for text, glyph, picture in rows
    ]
    return {"latents": latents, "timestep": inputs["timestep"], "conditions": conditions}


def stock_forward(transformer, inputs):
    return transformer(**inputs, return_dict=False)[0]


def gradients(transformer, out):
    """Return the gradients of a projection of the output, by parameter."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * weights).sum().backward()
    return {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}


def assert_close_relative(actual, expected, tolerance):
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def assert_same_gradients(actual, expected):
    """Compare with diffusers' gradients, which are zero for modules that this project's forward
    pass does not run.
    """
    for name, gradient in expected.items():
        if name not in actual:
            assert not gradient.any(), name
        # A softmax is invariant to shifts of its keys: this gradient is zero up to rounding.
        elif not name.endswith(REFINER_KEY_BIAS):
            assert (
                actual[name] - gradient
            ).abs().max() <= GRADIENT_TOLERANCE * gradient.abs().max(), name
    assert actual.keys() <= expected.keys()


# --- comparison with the original program and diffusers' class ---------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_batch_with_texts_of_different_lengths_matches_the_original(
    transformer, golden_inputs, case
):
    expected = load_file(GOLDEN / "transformer.safetensors")[case]
    with torch.no_grad():
        out = installed(transformer)(**trimmed(golden_inputs(case, *CASES[case])))
    assert_close_relative(out, expected, GOLDEN_TOLERANCE)


def test_outputs_and_gradients_match_diffusers(transformer, golden_inputs):
    case = "i2v_mixed"
    inputs = golden_inputs(case, *CASES[case])
    model = installed(transformer)
    out, expected = model(**trimmed(inputs)), stock_forward(transformer, inputs)
    assert_close_relative(out, expected, OUTPUT_TOLERANCE)
    assert_same_gradients(gradients(model, out), gradients(transformer, expected))


def test_text_to_video_and_image_to_video_samples_can_share_a_batch(transformer, golden_inputs):
    t2v, i2v = (trimmed(golden_inputs(case, *CASES[case])) for case in ("t2v_quoted", "i2v_mixed"))
    model = installed(transformer)

    def joined(first, second):
        return torch.cat([first, second]) if isinstance(first, torch.Tensor) else first + second

    with torch.no_grad():
        both = model(**{name: joined(t2v[name], i2v[name]) for name in t2v})
        assert_close_relative(both, torch.cat([model(**t2v), model(**i2v)]), OUTPUT_TOLERANCE)


def test_a_meanflow_model_uses_the_end_of_the_step(original_transformer, golden_inputs, tmp_path):
    config, state = original_transformer
    extra = {
        name.replace("time_in", "time_r_in"): transformer_weight(
            name.replace("time_in", "time_r_in"), tensor.shape
        )
        for name, tensor in state.items()
        if name.startswith("time_in.")
    }
    write_model(tmp_path / "transformer" / "step", config | {"use_meanflow": True}, state | extra)
    transformer = load_transformer(tmp_path, "step")
    inputs = golden_inputs("t2v_plain", *CASES["t2v_plain"])
    end = torch.tensor([800.5, 0.0])
    with torch.no_grad():
        model = installed(transformer)
        out = model(**trimmed(inputs), ends=end)
        assert_close_relative(
            out, stock_forward(transformer, inputs | {"timestep_r": end}), OUTPUT_TOLERANCE
        )
        assert not torch.allclose(out, model(**trimmed(inputs)))


# --- the installed forward pass ----------------------------------------------------------------


def test_a_compiled_block_is_a_single_graph_with_the_same_output(transformer, golden_inputs):
    inputs = trimmed(golden_inputs("t2v_quoted", (9, 9), (5, 5)))
    model = installed(transformer)
    with torch.no_grad():
        expected = model(**inputs)
        for module in model.transformer_blocks:
            module.compile(fullgraph=True, backend="eager")
        assert_close_relative(model(**inputs), expected, OUTPUT_TOLERANCE)


# --- unused parameters -------------------------------------------------------------------------


def test_exactly_the_parameters_without_gradient_are_frozen(transformer, golden_inputs):
    model = installed(transformer)
    trained = set(gradients(model, model(**trimmed(golden_inputs("i2v_mixed", (20, 11), (0, 7))))))
    freeze_unused_parameters(model)
    dead = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert dead == {name for name, _ in model.named_parameters()} - trained and len(dead) == 6
