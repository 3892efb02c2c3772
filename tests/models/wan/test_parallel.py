"""Wan over several gloo processes gives what one process gives: split sequences, and shards."""

import pytest
import torch

from tests.distributed.launch import launch
from tests.models.wan.tiny import distance, gradients, inputs, installed

MODULE = "tests.models.wan.test_parallel"
GRIDS = {"36 tokens": (3, 6, 8), "45 tokens": (3, 6, 10), "fewer tokens than ranks": (1, 2, 2)}


def compare_split(num_processes):
    """Largest deviation of the velocity, relative to its largest value, and of the mean gradient, by case."""
    import torch.distributed as dist

    from hyvideo.distributed import mesh as ranks
    from hyvideo.distributed.parallelize import parallelize

    mesh = ranks.start(num_processes, torch.device("cpu"))
    plain, split = installed(), installed()
    parallelize(split, mesh)
    found = {}
    for case, grid in GRIDS.items():
        arguments = inputs(2, grid)
        with torch.no_grad():
            expected = plain(**arguments)
            deviation = (split(**arguments) - expected).abs().max() / expected.abs().max()
        own = gradients(split, **arguments)
        for gradient in own.values():
            dist.all_reduce(gradient.div_(num_processes))
        found[case] = (deviation.item(), distance(own, gradients(plain, **arguments)))
    return found


@pytest.mark.parametrize("num_processes", [2, 3])
def test_three_heads_on_two_and_three_ranks_give_velocity_and_gradient_of_one_process(num_processes):
    for found in launch(f"{MODULE}:compare_split", num_processes, num_processes):
        assert found.keys() == GRIDS.keys()
        for case, (velocity, gradient) in found.items():
            assert velocity <= 2e-6 and gradient <= 2e-6, (case, velocity, gradient)


def compare_sharded(sp_size=1, **ways):
    """Rows of this rank's shard of the table of one row, and the deviation of the gradient of both ranks' samples."""
    from hyvideo.distributed import mesh as ranks
    from hyvideo.distributed.parallelize import parallelize
    from hyvideo.distributed.sharded_tensors import local, whole

    mesh = ranks.start(sp_size, torch.device("cpu"), timeout=300)
    plain, sharded = installed(), installed()
    parallelize(sharded, mesh, shard=True, **ways)
    rows = len(local(sharded.blocks[0].scale_shift_table))
    seeds = [rank // sp_size for rank in range(2)]  # ranks of a sequence-parallel group share their sample
    for seed in seeds:
        plain(**inputs(1, seed=seed)).square().mean().div(2).backward()
    sharded(**inputs(1, seed=seeds[mesh.rank])).square().mean().backward()
    found = {name: whole(parameter.grad) for name, parameter in sharded.named_parameters()}
    return rows, distance(found, {name: parameter.grad for name, parameter in plain.named_parameters()})


def test_shards_of_two_ranks_of_which_one_has_no_row_of_the_tables_give_the_gradient_of_one():
    results = launch(f"{MODULE}:compare_sharded", 2)
    assert [rows for rows, _ in results] == [1, 0]
    assert all(deviation <= 2e-6 for _, deviation in results)


def compare_all_together(sp_size):
    return compare_sharded(sp_size, recompute="selective", compile=True, compile_backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("sp_size", [1, 2])
def test_compiled_and_recomputed_blocks_in_shards_give_the_gradient_of_one(sp_size):
    for _, deviation in launch(f"{MODULE}:compare_all_together", 2, sp_size, timeout=600):
        assert deviation <= 2e-6


def bf16_time():
    """Whether the time embedding in shards is that of one process on weights that were rounded to bf16."""
    from hyvideo.distributed import mesh as ranks
    from hyvideo.distributed.parallelize import parallelize

    mesh = ranks.start(1, torch.device("cpu"), timeout=60)
    plain, sharded, found = installed().bfloat16().float(), installed(), []
    for model in (plain, sharded):
        model.blocks[0].register_forward_pre_hook(lambda block, given: found.append(given[2]))
    parallelize(sharded, mesh, shard=True, compute_dtype=torch.bfloat16)
    for model in (plain, sharded):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(**inputs(1))
    return found[1].dtype == torch.float32 and torch.equal(*found)


def test_in_shards_of_bf16_the_time_embedding_is_float32():
    assert launch(f"{MODULE}:bf16_time", 2) == [True, True]
