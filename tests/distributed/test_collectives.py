"""Tests of rows, gradients and metrics that two processes merge, and of the precision of FSDP's
gradients.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.collectives import (
    average_gradients,
    clip_gradients,
    merge_rows,
    sum_over_replicas,
)
from hyvideo.distributed.parallelize import parallelize
from hyvideo.models.conditions import Condition
from hyvideo.models.family import prepare
from hyvideo.schedulers.schedule import Schedule
from hyvideo.training.policy_update import PolicyUpdate
from hyvideo.training.rollout_batch import Pass
from tests.distributed.launch import launch
from tests.distributed.test_sequence_parallel import tiny_transformer


def on_two_ranks() -> dict:
    mesh = ranks.start(1, torch.device("cpu"))
    rows = merge_rows({mesh.rank: [1.0, mesh.rank], 2: [0.1, mesh.rank]}, 4, 2, mesh)
    parameters = [
        nn.Parameter(torch.zeros(2, 3)),
        nn.Parameter(torch.zeros(4)),
        nn.Parameter(torch.zeros(1)),
    ]
    parameters[0].grad = torch.full((2, 3), 1.0 + mesh.rank)
    if mesh.rank:
        parameters[1].grad = torch.arange(4.0)
    average_gradients(parameters, mesh, is_sharded=False)
    averaged = [parameter.grad.tolist() for parameter in parameters]
    # Two ranks that share a video: each has half of its tokens and twice their gradient.
    parameters[2].grad = torch.full((1,), 4.0 * mesh.rank)
    average_gradients(parameters[2:], replace(mesh, sp_size=2), is_sharded=False)
    found = {
        "rows": rows.nan_to_num(-1.0).tolist(),
        "gradients": averaged,
        "of one video": parameters[2].grad.item(),
        "norm": norm_of_shards(mesh),
    }
    own = torch.tensor([1.0 + mesh.rank])
    found["sums"] = [sum_over_replicas(own, replace(mesh, sp_size=size)).item() for size in (1, 2)]
    return found | {"by step": metrics_by_step(mesh), "beyond bf16": gradient_beyond_bf16(mesh)}


def norm_of_shards(mesh) -> list[float]:
    """Return the norm of the gradients of a sharded model before and after clipping to 0.5."""
    model = nn.Linear(1, 4, bias=False)
    fully_shard(model, mesh=mesh.shards)
    # row i, of which each rank has two, has the gradient 2 i
    weights = torch.arange(4.0)
    (model(torch.ones(1, 1)) * weights).sum().mul(2).backward()
    before = clip_gradients(list(model.parameters()), 0.5)
    (gradient,) = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return [before, gradient.norm().item()]


def metrics_by_step(mesh) -> list:
    """Return the metrics of three steps in an update in which each rank trains one rollout at steps
    1 and 0.
    """
    update = SimpleNamespace(mesh=mesh)
    rollouts = SimpleNamespace(trained_steps=torch.tensor([[1, 0]]), schedule=Schedule.ode(3, 1.0))
    work = SimpleNamespace(rollouts=rollouts, passes=[Pass([0], 0), Pass([0], 1)])
    ratios_and_kls = (
        torch.tensor([[1.5, 0.75], [4.0, 2.0]])
        if mesh.is_main
        else torch.tensor([[0.75, 1.5], [1.0, 0.0]])
    )
    by_term = torch.cat([ratios_and_kls, (ratios_and_kls[:1] - 1).abs()])
    return PolicyUpdate._by_step(update, work, by_term).tolist()


def gradient_beyond_bf16(mesh) -> float:
    """Return the fraction of the gradient of a sharded bf16 model that bf16 cannot represent."""
    model = tiny_transformer(num_layers=1)
    prepare(model, {"text"})
    parallelize(model, mesh, shard=True, compute_dtype=torch.bfloat16)
    latents = torch.randn(1, 4, 2, 4, 4, generator=torch.Generator().manual_seed(mesh.rank))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(
            latents,
            timestep=torch.tensor([500.0]),
            conditions=[Condition(torch.ones(5, 12).bfloat16())],
        )
    out[0].float().square().sum().backward()
    gradients = [
        parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None
    ]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    assert flat.dtype == torch.float32 and flat.any()
    return (flat != flat.bfloat16().float()).float().mean().item()


@pytest.fixture(scope="module")
def results():
    return launch(f"{__name__}:on_two_ranks", 2)


@pytest.mark.system
def test_rows_come_from_the_lowest_rank(results):
    for found in results:
        assert found["rows"] == [[1, 0], [1, 1], [0.1, 0], [-1, -1]]


def test_gradients_are_averaged_over_all_ranks(results):
    for found in results:
        assert found["gradients"] == [[[1.5] * 3] * 2, pytest.approx([0, 0.5, 1, 1.5]), [0]]
        assert found["of one video"] == 2


def test_gradients_are_clipped_by_the_norm_of_all_shards(results):
    norm = 2 * 14**0.5
    for found in results:
        assert found["norm"] == pytest.approx([norm, 0.5], rel=1e-5)


def test_a_sum_over_replicas_counts_ranks_that_share_videos_once(results):
    for found in results:
        assert found["sums"] == [3.0, 1.0]


def test_metrics_by_step_are_sums_over_the_replicas_and_the_largest_deviation_is_the_larger_one(
    results,
):
    counts, ratios, kls, deviations = [2, 2, 0], [2.25, 2.25, 0], [2, 5, 0], [0.5, 0.5, 0]
    assert [found["by step"] for found in results] == [[counts, ratios, kls, deviations]] * 2


def test_fsdp_averages_the_gradients_of_a_bf16_model_in_float32(results):
    """The mean of two bf16 numbers has more digits than bf16."""
    assert min(found["beyond bf16"] for found in results) > 0.1
