"""Compiled blocks: rollout and update give the same numbers, few graphs, and what lies around them works on.

The default cases stop before code is generated; with --slow inductor does so, which takes minutes on a CPU.
"""

import shutil
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.utils import counters
from torch.autograd.profiler import profile

from hyvideo.distributed.parallelize import parallelize
from hyvideo.models.conditions import Condition
from hyvideo.models.family import freeze_dead_parameters, install
from hyvideo.models.lora import start_lora, training_config
from hyvideo.training.anchor import WeightCopy
from tests.distributed.test_sequence_parallel import tiny

SLOW = pytest.mark.slow
NEEDS_COMPILER = [SLOW, pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")]
INDUCTOR = pytest.param("inductor", marks=NEEDS_COMPILER)


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    emulates = torch._inductor.config.emulate_precision_casts
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch._inductor.config.emulate_precision_casts = emulates


def small(num_layers=1):
    model = tiny(num_layers=num_layers)
    install(model)
    freeze_dead_parameters(model)
    return model


def call(model, text_length, *, grad=False, dtype=torch.float32):
    """Velocity of one sample with a prompt of this length, as a rollout or with a gradient."""
    generator = torch.Generator().manual_seed(text_length)
    size, text = (1, 9, 2, 4, 4), (text_length, 12)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        return model(
            torch.randn(size, generator=generator)[:, :4],
            timestep=torch.tensor([990.3]),
            conditions=[Condition(torch.randn(text, generator=generator))],
        )


def gradients(model, lengths, dtype=torch.float32):
    """Gradients of one backward pass over calls of each length, as the branches of guidance make."""
    model.zero_grad()
    sum(call(model, length, grad=True, dtype=dtype).float().square().mean() for length in lengths).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_deviation(found, expected, least=1e-5):
    """Of each tensor's numbers, relative to its largest; not of those that rounding alone makes."""
    assert found.keys() == expected.keys()
    scales = {name: tensor.abs().max() for name, tensor in expected.items() if tensor.abs().max() > least}
    return max(((found[name] - expected[name]).abs().max() / scale).item() for name, scale in scales.items())


@contextmanager
def counted_attention():
    calls = Counter()
    with profile(use_kineto=False) as profiled:
        yield calls
    calls.update({call.key: call.count for call in profiled.key_averages() if "flash_attention_for_cpu" in call.key})


def test_ten_lengths_of_text_make_one_graph_for_each_kind_of_block(mesh):
    model, plain = small(num_layers=3), small(num_layers=3)
    parallelize(model, mesh, compile=True, compile_backend="aot_eager")
    for length in (7, 9, 5, 8, 3, 11, 6, 14, 4, 10):
        torch.testing.assert_close(call(model, length), call(plain, length))
    # The last block is of another kind: nothing reads the text that it makes.
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    "recompute, backend",
    [
        ("selective", None),
        ("selective", "aot_eager"),
        pytest.param("full", "aot_eager", marks=SLOW),
        pytest.param("selective", "inductor", marks=NEEDS_COMPILER),
        pytest.param("full", "inductor", marks=NEEDS_COMPILER),
    ],
)
def test_recomputation_over_several_lengths_in_one_backward_keeps_attention_if_it_is_told_to(mesh, recompute, backend):
    model, plain = small(), small()
    parallelize(model, mesh, recompute=recompute, compile=bool(backend), compile_backend=backend or "")
    lengths = (7, 9, 4)
    expected = gradients(plain, lengths)
    gradients(model, lengths[:1])  # to compile calls attention too
    with counted_attention() as calls:
        found = gradients(model, lengths)
    assert largest_deviation(found, expected) <= 1e-5
    if backend:
        forward, backward = calls.values()  # of the text refiner and the block
        assert (forward, backward) == (9 if recompute == "full" else 6, 6)
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
def test_an_anchor_exchanged_in_place_computes_through_the_same_graph(mesh, backend):
    model, plain = small(), small()
    parallelize(model, mesh, compile=True, compile_backend=backend)
    copy = WeightCopy(model, dict(model.named_parameters()))
    before, graphs = call(model, 7), counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.mul_(1.1)
    after = call(model, 7)
    with copy.in_place():
        assert torch.equal(call(model, 7), before)
    assert torch.equal(call(model, 7), after)
    torch.testing.assert_close(after, call(plain, 7))
    assert not torch.allclose(after, before)
    assert counters["stats"]["unique_graphs"] == graphs == 1


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
def test_an_adapter_is_compiled_with_its_block(mesh, backend):
    model, plain = small(), small()
    for one in (model, plain):
        start_lora(one, training_config(one, rank=2, alpha=2.0))
        generator = torch.Generator().manual_seed(3)
        for name, parameter in one.named_parameters():
            if ".lora_" in name:
                parameter.data.normal_(std=0.1, generator=generator)
    parallelize(model, mesh, recompute="selective", compile=True, compile_backend=backend)
    found, expected = gradients(model, (7, 9)), gradients(plain, (7, 9))
    assert all(".lora_" in name for name in found)
    assert largest_deviation(found, expected, least=1e-7) <= 1e-4
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_rollout_and_update_are_equal_bit_for_bit_in_bf16_and_near_eager(mesh, recompute):
    model, plain = small(num_layers=2), small(num_layers=2)
    parallelize(model, mesh, recompute=recompute, compile=True)
    for length in (7, 9):
        rollout = call(model, length, dtype=torch.bfloat16)
        assert torch.equal(rollout, call(model, length, grad=True, dtype=torch.bfloat16))
        eager = call(plain, length, dtype=torch.bfloat16)
        assert (rollout - eager).float().square().mean() <= (1e-3) ** 2 * eager.float().square().mean()


def test_compiled_blocks_round_as_eager_does(mesh):
    """What the slow test above rests on."""
    torch._inductor.config.emulate_precision_casts = False
    parallelize(small(), mesh, compile=True, compile_backend="aot_eager")
    assert torch._inductor.config.emulate_precision_casts


def test_backends_that_are_for_tests_of_torch_are_not_offered(mesh):
    with pytest.raises(ValueError, match="must be one of .*inductor.*, aot_eager, eager, got 'relu_compile") as refusal:
        parallelize(small(), mesh, compile=True, compile_backend="relu_compile_error_TESTING_ONLY")
    assert str(refusal.value).count("TESTING_ONLY") == 1
