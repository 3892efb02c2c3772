"""Test of loading FSDP2 shards on four gloo processes from files that only the first rank reads."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.sharded_tensors import fill_shards
from hyvideo.models.loading import load_transformer, stream_transformer
from tests.distributed.launch import launch
from tests.shallow import write_trained

MODULE = "tests.distributed.test_sharded_tensors"
CPU = torch.device("cpu")


class Traffic(TorchDispatchMode):
    """Counter of the elements in the collectives of this rank."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "c10d":
            leaves = [leaf for leaf in tree_leaves(arguments[0]) if isinstance(leaf, torch.Tensor)]
            self.num_elements += sum(leaf.numel() for leaf in leaves)
        return function(*arguments, **options or {})


def fill(root, dp_replicate, seed):
    """Return the names of wrong tensors and the number of local, received and total elements."""
    mesh = ranks.start(1, CPU, dp_replicate=dp_replicate, timeout=60)
    expected = load_transformer(root, "miniature", random_weights_seed=seed).state_dict()
    model, weights = stream_transformer(
        root, "miniature", read=mesh.is_main, random_weights_seed=seed
    )
    for block in model.transformer_blocks:
        fully_shard(block, mesh=mesh.shards)
    fully_shard(model, mesh=mesh.shards)
    with Traffic() as traffic:
        fill_shards(model, weights, device=CPU)
    assert all(not parameter.is_meta for parameter in model.parameters())
    different = [
        name
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor.full_tensor(), expected[name])
    ]
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    return (
        different,
        local,
        traffic.num_elements,
        sum(tensor.numel() for tensor in expected.values()),
    )


def fill_each(root, cases):
    return [fill(root, *case) for case in cases]


@pytest.mark.slow
def test_every_rank_receives_only_its_shards_of_the_weights_of_the_first(tmp_path):
    root = write_trained(tmp_path / "ckpts")
    cases = [(1, 3), (2, None)]
    for rank, results in enumerate(launch(f"{MODULE}:fill_each", 4, root, cases)):
        for (dp_replicate, _), (different, local, received, whole) in zip(cases, results):
            assert different == [] and local < 0.3 * dp_replicate * whole
            if dp_replicate == 2 and rank >= 2:
                assert received == local  # only by the broadcast between replicas
            else:
                assert received < 1.2 * local * dp_replicate  # small tensors are padded
