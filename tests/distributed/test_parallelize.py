"""Test of compile, activation checkpointing, sequence parallelism and FSDP2 together against one
eager process.
"""

import pytest
import torch

from tests.distributed.launch import launch
from tests.distributed.test_sequence_parallel import inputs, tiny_transformer

MODULE = "tests.distributed.test_parallelize"
CASES = ("even", "even, quoted", "odd tokens")


def compare():
    """Return the largest deviation of outputs, the largest relative deviation of gradients, and the
    graph breaks.
    """
    from torch._dynamo.utils import counters

    from hyvideo.distributed import mesh as ranks
    from hyvideo.distributed.parallelize import parallelize
    from hyvideo.distributed.sharded_tensors import full_tensor
    from hyvideo.models.family import freeze_unused_parameters, install

    mesh = ranks.start(2, torch.device("cpu"), timeout=300)
    plain, sharded = tiny_transformer(num_layers=2), tiny_transformer(num_layers=2)
    for model in (plain, sharded):
        install(model)
        freeze_unused_parameters(model)
    parallelize(
        sharded, mesh, recompute="selective", compile=True, compile_backend="aot_eager", shard=True
    )
    worst = 0.0
    for model in (plain, sharded):
        sum(model(**inputs(case)).square().mean() for case in CASES).backward()
    with torch.no_grad():
        output = max(
            (sharded(**inputs(case)) - plain(**inputs(case))).abs().max().item() for case in CASES
        )
    for expected, found in zip(plain.parameters(), sharded.parameters()):
        if expected.grad is not None and (scale := expected.grad.abs().max()) > 1e-5:
            worst = max(
                worst, ((full_tensor(found.grad) - expected.grad).abs().max() / scale).item()
            )
    return output, worst, sum(counters["graph_break"].values())


@pytest.mark.slow
def test_compiled_and_sharded_blocks_on_two_ranks_have_the_gradients_of_one_process():
    for output, gradient, graph_breaks in launch(f"{MODULE}:compare", 2, timeout=1200):
        assert output <= 2e-6 and gradient <= 1e-4, (output, gradient)
        assert graph_breaks == 0
