"""Two gloo processes fill FSDP2 shards from files that the first alone reads."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.sharded_tensors import fill_shards
from hyvideo.models.loading import load_transformer, stream_transformer
from tests.distributed.launch import launch
from tests.tiny_checkpoint import write_original

CPU = torch.device("cpu")


def fill(root):
    """Names of the tensors that are not what the file has, how much of the model is here, and how much there is."""
    ranks.join(CPU, timeout=60)
    expected = load_transformer(root, "480p_t2v").state_dict()
    model, weights = stream_transformer(root, "480p_t2v", read=dist.get_rank() == 0)
    for block in model.transformer_blocks:
        fully_shard(block)
    fully_shard(model)
    fill_shards(model, weights, device=CPU)
    assert all(not parameter.is_meta for parameter in model.parameters())
    different = [
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor.full_tensor(), expected[name])
    ]
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    return different, local, sum(tensor.numel() for tensor in expected.values())


def test_every_rank_gets_its_shard_of_what_the_first_reads(tmp_path):
    root = write_original(tmp_path / "ckpts")
    for different, local, whole in launch("tests.distributed.test_sharded_tensors:fill", 2, str(root)):
        assert different == [] and local < 0.6 * whole
