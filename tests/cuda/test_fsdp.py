"""FSDP with one NCCL rank and full-width blocks gives the numbers of the model that is not
sharded.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import prepare_backward
from hyvideo.distributed.sharded_tensors import full_tensor
from hyvideo.models.family import prepare
from tests.cuda.speed import seconds_of
from tests.cuda.workload import DEVICE, IS_TINY, arrange

pytestmark = pytest.mark.cuda
NUM_LAYERS = 1 if IS_TINY else 4
NUM_PASSES = 2  # accumulated before the reduction


@contextmanager
def one_rank():
    """A process group of this process: NCCL on a GPU, gloo on the CPU."""
    if DEVICE.type == "cuda":
        device = torch.device("cuda", 0)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device
        )
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(layout):
    """Return the mesh of a run that is not sharded, is sharded, or is sharded within model
    replicas.
    """
    names = {"none": (), "sharded": ("shard",), "replicated": ("replicate", "shard")}[layout]
    shards = (
        init_device_mesh(DEVICE.type, (1,) * len(names), mesh_dim_names=names) if names else None
    )
    return Mesh(rank=0, world_size=1, sp_size=1, shards=shards)


def forward(model, inputs):
    """Return the velocity, computed in bf16 as by a run."""
    with torch.autocast(DEVICE.type, torch.bfloat16):
        return model(**inputs)


@pytest.fixture(scope="module")
def few_blocks(work):
    return replace(work, sizes=work.sizes | {"num_layers": NUM_LAYERS})


def run(few_blocks, record, layout, compiled):
    """Return the velocity and the gradients of an update of two passes."""
    model = few_blocks.transformer()
    prepare(model, {"text"})
    if layout != "none":
        model.float()  # the master weights of a run; FSDP gathers them in bf16
    arrange(
        model,
        mesh=mesh_of(layout),
        recompute="full",
        compile=compiled,
        shard=layout != "none",
        compute_dtype=few_blocks.dtype,
    )
    torch.manual_seed(1)
    inputs = few_blocks.inputs(model)["ours"]
    if layout == "none":
        sums = {
            name: 0.0 for name, parameter in model.named_parameters() if parameter.requires_grad
        }
    for number in range(NUM_PASSES):
        prepare_backward(model, is_last=number == NUM_PASSES - 1, only_last=True)

        def a_pass():
            forward(model, inputs).float().square().mean().backward()

        record({f"pass {number + 1}, s": seconds_of(a_pass, DEVICE)})
        if layout == "none":  # gradients of a model in bf16 are added in float32 as by FSDP
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums[name] + parameter.grad.float()
            model.zero_grad(set_to_none=True)
    with torch.no_grad():
        velocity = forward(model, inputs)
    if layout != "none":
        sums = {n: full_tensor(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return velocity, sums


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sharding_does_not_change_the_numbers(few_blocks, record, compiled):
    """Records the seconds of each pass, and compares velocity and gradients bit for bit."""
    with one_rank():
        number = torch.ones(3, device=DEVICE)
        dist.all_reduce(number)
        assert number.tolist() == [1, 1, 1]

        def recorded(layout):
            return lambda values: record(
                {f"{layout}: {name}": value for name, value in values.items()}
            )

        velocity, gradients = run(few_blocks, recorded("none"), "none", compiled)
        for layout in ("sharded", "replicated"):
            ours, ours_gradients = run(few_blocks, recorded(layout), layout, compiled)
            record({f"{layout}: velocity bit for bit": torch.equal(ours, velocity)})
            pairs = [
                (ours_gradients[name], value)
                for name, value in gradients.items()
                if name in ours_gradients
            ]
            record({f"{layout}: gradients bit for bit": all(torch.equal(*pair) for pair in pairs)})
            largest = max(
                ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in pairs
            )
            record({f"{layout}: largest difference of a gradient": largest})
            assert torch.equal(ours, velocity)
            assert len(pairs) > 10 and largest < 1e-2
