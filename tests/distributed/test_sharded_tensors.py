"""Two gloo processes fill FSDP2 shards from files that the first alone reads."""

import os
import subprocess
import sys
from pathlib import Path

from tests.tiny_checkpoint import write_original

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from hyvideo.distributed.sharded_tensors import fill_shards
from hyvideo.models.loading import load_transformer, stream_transformer

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, root = dist.get_rank(), sys.argv[1]
expected = load_transformer(root, "480p_t2v").state_dict()
model, weights = stream_transformer(root, "480p_t2v", read=rank == 0)
for block in model.transformer_blocks:
    fully_shard(block)
fully_shard(model)
fill_shards(model, weights, device=torch.device("cpu"))
local = sum(p.to_local().numel() for p in model.parameters())
for name, tensor in model.state_dict().items():
    assert torch.equal(tensor.full_tensor(), expected[name]), name
whole = sum(t.numel() for t in expected.values())
assert local < 0.6 * whole, (local, whole)
assert all(not p.is_meta for p in model.parameters())
print("filled")
dist.destroy_process_group()
"""


def test_every_rank_gets_its_shard_of_what_the_first_reads(tmp_path):
    root = write_original(tmp_path / "ckpts")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(program), str(root)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("filled") == 2  # the two may write at once
