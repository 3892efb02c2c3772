"""What every model family promises: diffusers' velocity and gradients, independent rows of a batch,
recomputation without a change, names of the original, ranks that share the tokens, and adapters.
"""

import copy

import pytest
import torch

from hyvideo.distributed.parallelize import parallelize
from hyvideo.models.conditions import Condition
from hyvideo.models.family import component_of, family_of, install
from hyvideo.models.hunyuan_video15.transformer import rotary_tables
from hyvideo.models.loading import load_transformer
from hyvideo.models.lora import (
    LoraPair,
    add_lora,
    add_trainable_lora,
    current_lora,
    target_modules,
    training_config,
)
from hyvideo.models.lora_files import read_lora
from hyvideo.models.lora_saving import save_lora
from hyvideo.models.wan.transformer import rotary_tables as wan_rotary_tables
from hyvideo.planning.counting import fake_tensors
from tests.distributed.launch import launch
from tests.distributed.test_sequence_parallel import tiny_transformer
from tests.examples.mochi import tiny as mochi
from tests.models.test_lora import assert_same
from tests.models.wan import test_anyflow as anyflow
from tests.models.wan import test_first_frame as first_frame
from tests.models.wan import test_picture_features as picture_features
from tests.models.wan import tiny as wan
from tests.models.wan.tiny import distance, loss_of
from tests.registered import registered
from tests.stock_models import stock_inputs, stock_twin

TIMES = (937.5, 412.25, 55.1)


def hunyuan_inputs(batch=2):
    """Return samples with texts of different lengths, of which the second has quoted text."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randn(length, 12, generator=generator) for length in (7, 19, 1)]
    glyphs = [None, torch.randn(4, 10, generator=generator), None]
    return {
        "latents": torch.randn(batch, 4, 2, 4, 4, generator=generator),
        "timestep": torch.tensor(TIMES[:batch]),
        "conditions": [Condition(*parts) for parts in zip(texts[:batch], glyphs)],
    }


def stock_velocity(model, **arguments):
    return model(**stock_inputs(model, **arguments))[0]


def mochi_velocity(model, **arguments):
    return mochi.stock_velocity(model, **arguments)


# A model without this project's forward pass, its inputs, and diffusers' velocity for them.
FAMILIES = {
    "hunyuan_video15": (tiny_transformer, hunyuan_inputs, stock_velocity),
    "wan": (wan.tiny, wan.inputs, stock_velocity),
    "anyflow": (anyflow.tiny_anyflow, anyflow.with_ends, anyflow.stock_velocity),
    "mochi": (mochi.tiny, mochi.inputs, mochi_velocity),
}
VARIANTS = FAMILIES | {
    "wan with single latents as tokens": (
        lambda: wan.tiny(patch_size=(1, 1, 1)),
        wan.inputs,
        stock_velocity,
    ),
    "wan with features of a picture": (
        picture_features.tiny_with_features,
        picture_features.with_features,
        stock_velocity,
    ),
    "anyflow that reads lengths": (
        lambda: anyflow.tiny_anyflow(deltatime_type="t-r", gate_value=0.6),
        anyflow.with_ends,
        anyflow.stock_velocity,
    ),
}
BUILT_IN = ("hunyuan_video15", "wan")


@pytest.fixture(scope="module", autouse=True)
def _mochi():
    with registered(mochi.FOLDER):
        yield


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def installed(family):
    model = FAMILIES[family][0]()
    install(model)
    return model


def velocity_of(model, family, batch=2, **changes):
    with torch.no_grad():
        return model(**FAMILIES[family][1](batch) | changes)


def gradients_of(model, velocity):
    """Return the gradient of each parameter; those that the velocity does not depend on are zero."""
    model.zero_grad()
    loss_of(velocity).backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def relative(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_velocity_and_gradients_equal_diffusers(variant):
    make, inputs, stock = VARIANTS[variant]
    ours = make()
    theirs = copy.deepcopy(stock_twin(ours))
    install(ours)
    found, expected = ours(**inputs(3)), stock(theirs, **inputs(3))
    assert relative(found, expected) <= 2e-6
    assert distance(gradients_of(ours, found), gradients_of(theirs, expected)) <= 5e-6


def test_rows_of_a_batch_are_independent(family):
    model, inputs = installed(family), FAMILIES[family][1](3)
    together = velocity_of(model, family, 3)
    for row in range(3):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        with torch.no_grad():
            torch.testing.assert_close(together[row : row + 1], model(**alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", BUILT_IN)
def test_timesteps_in_bf16_are_an_error(family):
    with pytest.raises(ValueError, match="float32"):
        velocity_of(installed(family), family, 1, timestep=torch.tensor([937.5]).bfloat16())


def test_a_copy_has_its_own_weights_and_installing_again_changes_nothing(family):
    model = installed(family)
    before, twin = velocity_of(model, family), copy.deepcopy(model)
    install(model)
    assert torch.equal(velocity_of(model, family), before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(velocity_of(twin, family), before)
    assert not velocity_of(model, family).any()


@pytest.mark.parametrize("family", BUILT_IN)
def test_flops_that_are_counted_without_values_change_no_later_forward_pass(family):
    model, inputs = installed(family), FAMILIES[family][1](2)
    before = velocity_of(model, family)
    rotary_tables.cache_clear()
    wan_rotary_tables.cache_clear()
    with fake_tensors(family_of(model).name), torch.no_grad():
        model(**inputs | {"latents": torch.empty(inputs["latents"].shape)})
    assert torch.equal(velocity_of(model, family), before)


@pytest.mark.parametrize("family", BUILT_IN)
def test_a_model_used_in_inference_mode_can_be_trained_afterwards(family):
    """Cached tables must not stay tensors of the inference mode."""
    model = installed(family)
    rotary_tables.cache_clear()
    wan_rotary_tables.cache_clear()
    with torch.inference_mode():
        model(**FAMILIES[family][1](2))
    assert any(grad.any() for grad in gradients_of(model, model(**FAMILIES[family][1](2))).values())


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_changes_no_bit_of_the_gradients(family, mesh, recompute):
    plain, model = installed(family), installed(family)
    parallelize(model, mesh, recompute=recompute)
    found, expected = (
        gradients_of(each, each(**FAMILIES[family][1](2))) for each in (model, plain)
    )
    assert any(gradient.any() for gradient in expected.values())
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("family", BUILT_IN)
def test_names_of_the_original_are_converted_back_to_the_bit(family):
    model = FAMILIES[family][0]()
    component, state = component_of(model), model.state_dict()
    again = component.to_diffusers(component.to_original(state))
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
    with pytest.raises(ValueError, match=r"what\.weight"):
        component.to_diffusers(component.to_original(state) | {"what.weight": torch.zeros(1)})


def test_a_saved_model_is_loaded_to_the_bit(family, tmp_path):
    model = FAMILIES[family][0]()
    model.save_pretrained(tmp_path / "transformer")
    state = load_transformer(tmp_path, None).state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


# --- several ranks --------------------------------------------------------------------------------

ON_RANKS = FAMILIES | {
    "wan with a first frame": (
        wan.tiny,
        lambda batch: first_frame.with_image(wan.inputs(batch)),
        None,
    ),
    "wan with 45 tokens": (wan.tiny, lambda batch: wan.inputs(batch, (3, 6, 10)), None),
    "wan with fewer tokens than ranks": (
        wan.tiny,
        lambda batch: wan.inputs(batch, (1, 2, 2)),
        None,
    ),
}


def split_over(num_ranks):
    """Return the largest deviation of the velocity of ranks that share the tokens, relative to its
    maximum, and that of the mean gradient, by family.
    """
    import torch.distributed as dist

    from hyvideo.distributed import mesh as ranks

    mesh, found = ranks.start(num_ranks, torch.device("cpu")), {}
    with registered(mochi.FOLDER):
        for family, (make, inputs, _) in ON_RANKS.items():
            plain, split = make(), make()
            install(plain)
            install(split)
            parallelize(split, mesh)
            expected, velocity = plain(**inputs(2)), split(**inputs(2))
            gradients, reduced = gradients_of(plain, expected), gradients_of(split, velocity)
            for gradient in reduced.values():
                dist.all_reduce(gradient.div_(num_ranks))
            found[family] = relative(velocity, expected), distance(reduced, gradients)
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_share_the_tokens_have_velocity_and_gradients_of_one(num_ranks):
    for found in launch("tests.models.test_family_contract:split_over", num_ranks, num_ranks):
        assert found.keys() == ON_RANKS.keys()
        for family, (velocity, gradient) in found.items():
            assert velocity <= 5e-6 and gradient <= 5e-6, (family, velocity, gradient)


# --- adapters -------------------------------------------------------------------------------------


def drawn_lora(model, alpha=3.0):
    """Return a LoRA of rank 2 of all matrices of the blocks."""
    generator = torch.Generator().manual_seed(0)
    lora = {}
    for name in target_modules(model, [family_of(model).target_modules]):
        out, into = model.get_submodule(name).weight.shape
        a, b = (torch.randn(*shape, generator=generator) for shape in ((2, into), (out, 2)))
        lora[name] = LoraPair(a, 0.1 * b, alpha)
    return lora


def test_a_new_adapter_changes_nothing_and_alone_is_trained(family):
    model, plain = installed(family), installed(family)
    add_trainable_lora(model, training_config(model, rank=2, alpha=4.0))
    assert current_lora(model).keys() == drawn_lora(plain).keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.zero_()
    velocity = model(**FAMILIES[family][1](2))
    assert torch.equal(velocity, velocity_of(plain, family))
    velocity.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (".lora_" in name), name


def test_an_added_adapter_is_the_change_of_the_weights(family):
    lora = drawn_lora(installed(family))
    added, merged = installed(family), installed(family)
    add_lora(added, lora)
    with torch.no_grad():
        for name, pair in lora.items():
            change = pair.alpha / pair.rank * pair.b @ pair.a
            merged.get_submodule(name).weight.add_(change)
    found, expected = (velocity_of(model, family) for model in (added, merged))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert relative(found, velocity_of(installed(family), family)) > 1e-3


# ComfyUI's form has one matrix for query, key and value (test_lora.py)
@pytest.mark.parametrize("form", ["diffusers", "peft", "original"])
def test_an_adapter_is_saved_and_read_to_the_bit(family, tmp_path, form):
    # form original has alpha in B, which is exact for the rank
    lora = drawn_lora(FAMILIES[family][0](), alpha=2.0 if form == "original" else 0.3)
    if form == "original" and family == "mochi":  # it has only diffusers' layout
        pytest.skip("no original names")
    save_lora(lora, tmp_path, form=form)
    assert_same(read_lora(tmp_path), lora)


@pytest.mark.parametrize("family, other", [BUILT_IN, BUILT_IN[::-1]])
def test_an_adapter_of_another_family_is_an_error(family, other):
    model = installed(family)
    with pytest.raises(ValueError, match=f"of family {family}"):
        add_lora(model, drawn_lora(installed(other)))
    assert not hasattr(model, "peft_config")
