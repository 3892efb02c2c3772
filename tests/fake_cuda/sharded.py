"""Blocks sharded with FSDP2 on the fake device: a process group of 8 ranks that exchanges
nothing.
"""

from tests.fake_cuda import device, streams  # first, before torch looks for CUDA

# isort: split

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401  # lets collectives run on FakeTensors
from diffusers import HunyuanVideo15Transformer3DModel
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import parallelize, prepare_backward
from hyvideo.models.conditions import Condition
from hyvideo.models.family import prepare

RANKS, NUM_BLOCKS = 8, 2
NAMES = ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce")


def mesh() -> Mesh:
    """Return the mesh of rank 0. It must not be created from FakeTensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    shards = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("shard",))
    return Mesh(rank=0, world_size=RANKS, sp_size=1, shards=shards)


def sharded_model(mesh):
    with torch.device("meta"):
        model = HunyuanVideo15Transformer3DModel(num_layers=NUM_BLOCKS).eval()
        prepare(model, {"text"})
    device.on_device(model, torch.float32)
    parallelize(model, mesh, recompute="selective", shard=True, compute_dtype=torch.bfloat16)
    return model


def sharded(mesh, grid) -> dict:
    """Count a forward pass of a rank without gradient, and a forward and backward pass."""
    model = sharded_model(mesh)
    empty = torch.ops.aten.empty
    inputs = {
        "latents": empty([1, 32, *grid], dtype=torch.float32, device="cuda"),
        "timestep": empty([1], dtype=torch.float32, device="cuda"),
        "conditions": [Condition(empty([200, 3584], dtype=torch.bfloat16, device="cuda"))],
    }
    state = model._get_fsdp_state()
    state._lazy_init()
    streams.names |= {getattr(state._comm_ctx, f"{part}_stream").stream_id: part for part in NAMES}
    found, count = {}, device.Count()
    with count, torch.autocast("cuda", torch.bfloat16):
        for name in ("sampling", "training"):
            count.clear()
            streams.log = []
            with torch.set_grad_enabled(name == "training"):
                velocity = model(**inputs)[0]
            if name == "training":
                prepare_backward(model, is_last=True, only_last=True)
                velocity.sum().backward()
            found[name] = summary(count, streams.log)
    streams.log = None
    return found


def summary(count, log) -> dict:
    copies = {name: count.bytes[name] / 1e9 for name in ("split_with_sizes_copy", "chunk_cat")}
    return {"steps": log, "gigabytes": copies, "waits": dict(count.waits)}
