"""Traffic of a compiled block, counted by torch's compiler on a CPU; in a separate process, which
sets its options.
"""

import json
import subprocess
import sys

import pytest

from hyvideo.planning.cost import _LORA_TRAFFIC, _TRAFFIC
from tests.forked import ROOT

PROGRAM = """
import json, logging, sys
import torch
import torch._inductor.compile_fx
from diffusers import HunyuanVideo15Transformer3DModel
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from hyvideo.models.attention import Layout
from hyvideo.models.family import install
from hyvideo.models.lora import add_trainable_lora, training_config

rank, tokens, text, width = int(sys.argv[1]), 1024, 8, 2048
torch.set_num_threads(1)
torch._dynamo.config.specialize_float = True
torch._inductor.config.emulate_precision_casts = torch._inductor.config.deterministic = True
torch._inductor.config.fx_graph_cache = False
torch._inductor.compile_fx.inductor_metrics_log.setLevel(logging.INFO)  # otherwise it does not count bytes
torch._inductor.compile_fx.inductor_metrics_log.propagate = False
graphs, count_bytes = [], GraphLowering.count_bytes

def count(graph):
    found = count_bytes(graph)
    nodes = [node for node, _ in found[1] if not isinstance(node, ExternKernelSchedulerNode)]
    graphs.append(sum(node.get_read_write_buffers_sizes() for node in nodes) / ((tokens + text) * width * 2))
    return found

GraphLowering.count_bytes = count
with torch.device("meta"):
    model = HunyuanVideo15Transformer3DModel(num_layers=2, num_refiner_layers=1)
    install(model)
    if rank:
        add_trainable_lora(model, training_config(model, rank=rank, alpha=rank))
block = model.transformer_blocks[0].to_empty(device="cpu")
for parameter in block.parameters():
    parameter.data = parameter.data.to(torch.float32 if rank and parameter.requires_grad else torch.bfloat16)
    torch.nn.init.normal_(parameter, std=0.02)
    if not rank:
        parameter.requires_grad_(True)
block.compile(backend="inductor", dynamic=False)
image, context = (torch.randn(1, n, width, dtype=torch.bfloat16, requires_grad=True) for n in (tokens, text))
layout = Layout(torch.randn(tokens, 128), torch.randn(tokens, 128), (text,), tokens)
with torch.autocast("cpu", torch.bfloat16):
    out = block(image, context, torch.randn(1, width, dtype=torch.bfloat16), layout)
torch.autograd.backward(out, [torch.ones_like(each) for each in out])
print(json.dumps(graphs))
"""


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank, planned", [(0, _TRAFFIC), (32, _LORA_TRAFFIC)])
def test_the_traffic_of_a_compiled_block_is_that_of_its_kernels_without_products_and_attention(
    lora_rank, planned
):
    """A forward pass without gradient, as in a rollout, has up to 4 units more than one that keeps
    tensors.
    """
    command = [sys.executable, "-c", PROGRAM, str(lora_rank)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    forward, backward = json.loads(done.stdout.splitlines()[-1])
    assert planned["compiled"] == pytest.approx((forward, backward), rel=0.15)
    assert planned["compiled"][1] == pytest.approx(backward, rel=0.02)
