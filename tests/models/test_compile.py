"""Tests of compiled blocks: rollout and update agree, there are few graphs, and other features work
with them.

The default cases stop before code generation. With --slow, inductor generates code, which takes
minutes on a CPU.
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
from hyvideo.models.family import freeze_unused_parameters, install
from tests.distributed.test_sequence_parallel import tiny_transformer

SLOW = pytest.mark.slow
NEEDS_COMPILER = [SLOW, pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")]


@pytest.fixture(autouse=True)
def without_graphs_of_other_tests():
    emulate_precision_casts = torch._inductor.config.emulate_precision_casts
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch._inductor.config.emulate_precision_casts = emulate_precision_casts


def small(num_layers=1):
    model = tiny_transformer(num_layers=num_layers)
    install(model)
    freeze_unused_parameters(model)
    return model


def call(
    model,
    text_length,
    *,
    grad=False,
    dtype=torch.float32,
):
    """Return the velocity of one sample with a prompt of this length, as in a rollout or with
    gradients.
    """
    generator = torch.Generator().manual_seed(text_length)
    size, text = (1, 9, 2, 4, 4), (text_length, 12)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        return model(
            torch.randn(size, generator=generator)[:, :4],
            timestep=torch.tensor([990.3]),
            conditions=[Condition(torch.randn(text, generator=generator))],
        )


def gradients(model, lengths, dtype=torch.float32):
    """Return the gradients of one backward pass over a call of each length, as with the branches of
    guidance.
    """
    model.zero_grad()
    sum(
        call(model, length, grad=True, dtype=dtype).float().square().mean() for length in lengths
    ).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_deviation(found, expected, least=1e-5):
    """Return the largest deviation relative to each tensor's maximum, ignoring tensors that are
    rounding errors.
    """
    assert found.keys() == expected.keys()
    scales = {
        name: tensor.abs().max() for name, tensor in expected.items() if tensor.abs().max() > least
    }
    return max(
        ((found[name] - expected[name]).abs().max() / scale).item()
        for name, scale in scales.items()
    )


@contextmanager
def counted_attention():
    calls = Counter()
    with profile(use_kineto=False) as profiled:
        yield calls
    calls.update(
        {
            call.key: call.count
            for call in profiled.key_averages()
            if "flash_attention_for_cpu" in call.key
        }
    )


@pytest.mark.slow
def test_ten_text_lengths_share_one_graph_per_kind_of_block(mesh):
    model, plain = small(num_layers=3), small(num_layers=3)
    parallelize(model, mesh, compile=True, compile_backend="eager")
    for length in (7, 9, 5, 8, 3, 11, 6, 14, 4, 10):
        torch.testing.assert_close(call(model, length), call(plain, length))
    # The last block is of another kind: its text output is not used.
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.system
@pytest.mark.parametrize(
    "recompute, backend",
    [
        ("selective", None),
        pytest.param("full", "aot_eager", marks=SLOW),
        pytest.param("selective", "inductor", marks=NEEDS_COMPILER),
    ],
)
def test_activation_checkpointing_over_several_lengths_recomputes_attention_only_if_full(
    mesh, recompute, backend
):
    model, plain = small(), small()
    parallelize(
        model, mesh, recompute=recompute, compile=bool(backend), compile_backend=backend or ""
    )
    lengths = (7, 9, 4)
    expected = gradients(plain, lengths)
    gradients(model, lengths[:1])  # compile first, because compilation also calls attention
    with counted_attention() as calls:
        found = gradients(model, lengths)
    assert largest_deviation(found, expected) <= 1e-5
    if backend:
        forward, backward = calls.values()  # in the text refiner and the block
        assert (forward, backward) == (9 if recompute == "full" else 6, 6)
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_rollout_and_update_are_bit_identical_in_bf16_and_as_exact_as_eager(mesh, recompute):
    """Compiled kernels round in other places than eager ones, on some CPUs also with
    `emulate_precision_casts`; their distance from float32 is that of eager.
    """
    model, plain = small(num_layers=2), small(num_layers=2)
    parallelize(model, mesh, recompute=recompute, compile=True)
    for length in (7, 9):
        rollout = call(model, length, dtype=torch.bfloat16)
        assert torch.equal(rollout, call(model, length, grad=True, dtype=torch.bfloat16))
        exact = call(plain, length)
        eager = call(plain, length, dtype=torch.bfloat16)
        distance, of_eager = ((each.float() - exact).norm() for each in (rollout, eager))
        assert 0 < distance < 1.3 * of_eager < 0.05 * exact.norm()


def test_compiled_blocks_round_as_eager_does(mesh):
    """The slow test above depends on this setting."""
    torch._inductor.config.emulate_precision_casts = False
    parallelize(small(), mesh, compile=True, compile_backend="aot_eager")
    assert torch._inductor.config.emulate_precision_casts
