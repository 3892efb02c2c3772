"""Tests that Wan on several gloo processes, with sequence parallelism or sharding, matches a single
process.
"""

import pytest
import torch

from tests.distributed.launch import launch
from tests.models.wan.tiny import distance, inputs, installed

MODULE = "tests.models.wan.test_parallel"


def compare_sharded(sp_size=1, **options):
    """Return this rank's number of rows of a one-row table, and the deviation of the gradient of
    both samples.
    """
    from hyvideo.distributed import mesh as ranks
    from hyvideo.distributed.parallelize import parallelize
    from hyvideo.distributed.sharded_tensors import full_tensor, local_shard

    mesh = ranks.start(sp_size, torch.device("cpu"), timeout=300)
    plain, sharded = installed(), installed()
    parallelize(sharded, mesh, shard=True, **options)
    rows = len(local_shard(sharded.blocks[0].scale_shift_table))
    # ranks of a sequence-parallel group share a sample
    seeds = [rank // sp_size for rank in range(2)]
    for seed in seeds:
        plain(**inputs(1, seed=seed)).square().mean().div(2).backward()
    sharded(**inputs(1, seed=seeds[mesh.rank])).square().mean().backward()
    found = {name: full_tensor(parameter.grad) for name, parameter in sharded.named_parameters()}
    return rows, distance(
        found, {name: parameter.grad for name, parameter in plain.named_parameters()}
    )


@pytest.mark.system
def test_sharded_gradients_match_one_process_if_a_rank_has_no_rows_of_the_tables():
    results = launch(f"{MODULE}:compare_sharded", 2)
    assert [rows for rows, _ in results] == [1, 0]
    assert all(deviation <= 2e-6 for _, deviation in results)


def compare_all_together(sp_size):
    return compare_sharded(
        sp_size, recompute="selective", compile=True, compile_backend="aot_eager"
    )


@pytest.mark.slow
@pytest.mark.parametrize("sp_size", [1, 2])
def test_gradients_of_sharded_compiled_and_checkpointed_blocks_match_one_process(sp_size):
    for _, deviation in launch(f"{MODULE}:compare_all_together", 2, sp_size, timeout=600):
        assert deviation <= 2e-6


def bf16_time():
    """Return whether the time embedding of a sharded model equals that of one process with bf16
    weights.
    """
    from hyvideo.distributed import mesh as ranks
    from hyvideo.distributed.parallelize import parallelize

    mesh = ranks.start(1, torch.device("cpu"), timeout=60)
    plain, sharded, found = installed().bfloat16().float(), installed(), []
    for model in (plain, sharded):
        model.blocks[0].register_forward_pre_hook(lambda block, args: found.append(args[2]))
    parallelize(sharded, mesh, shard=True, compute_dtype=torch.bfloat16)
    for model in (plain, sharded):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(**inputs(1))
    return found[1].dtype == torch.float32 and torch.equal(*found)


def test_the_time_embedding_of_a_sharded_bf16_model_is_float32():
    assert launch(f"{MODULE}:bf16_time", 2) == [True, True]
