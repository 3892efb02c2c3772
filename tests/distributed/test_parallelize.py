"""Compile, recomputation, sequence parallel and FSDP2 together: gradients are those of one eager process."""

import shutil

import pytest
import torch

from tests.distributed.launch import launch
from tests.distributed.test_sequence_parallel import inputs, tiny

MODULE = "tests.distributed.test_parallelize"
CASES = ("even", "even, quoted", "odd tokens")


def compare(sp_size, backend, recompute):
    """Largest deviations of outputs and of gradients, relative to the largest of their tensor, and graph breaks."""
    from torch._dynamo.utils import counters

    from hyvideo.distributed import mesh as ranks
    from hyvideo.distributed.parallelize import Parallelism, parallelize
    from hyvideo.distributed.sharded_tensors import whole
    from hyvideo.models.attention import freeze_dead_parameters
    from hyvideo.models.transformer import install

    mesh = ranks.start(sp_size, torch.device("cpu"), timeout=300)
    plain, sharded = tiny(num_layers=2), tiny(num_layers=2)
    for model in (plain, sharded):
        install(model)
        freeze_dead_parameters(model)
    parallelize(sharded, mesh, Parallelism(recompute, compile=True, compile_backend=backend, shard=True))
    worst = 0.0
    for model in (plain, sharded):
        sum(model(**inputs(case)).square().mean() for case in CASES).backward()
    with torch.no_grad():
        output = max((sharded(**inputs(case)) - plain(**inputs(case))).abs().max().item() for case in CASES)
    for expected, found in zip(plain.parameters(), sharded.parameters()):
        if expected.grad is not None and (scale := expected.grad.abs().max()) > 1e-5:
            worst = max(worst, ((whole(found.grad) - expected.grad).abs().max() / scale).item())
    return output, worst, sum(counters["graph_break"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "sp_size, backend, recompute",
    [
        (1, "aot_eager", "selective"),
        (2, "aot_eager", "selective"),
        (2, "aot_eager", "full"),
        pytest.param(2, "inductor", "selective", marks=pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")),
    ],
)
def test_compiled_blocks_in_shards_on_two_ranks_give_the_gradients_of_one(sp_size, backend, recompute):
    for output, gradient, graph_breaks in launch(f"{MODULE}:compare", 2, sp_size, backend, recompute, timeout=1200):
        assert output <= 2e-6 and gradient <= 1e-4, (output, gradient)
        assert graph_breaks == 0
