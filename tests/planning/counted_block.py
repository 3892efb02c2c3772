"""Bytes and FLOPs of one block on a simulated GPU, as JSON:
``python -m tests.planning.counted_block``.

For one sample and branch of 81 frames of 480 x 864: peak and kept bytes of the forward pass, peak
of the backward pass.
"""

import tests.fake_cuda.device as fake  # isort: skip - before torch initializes CUDA

import json
import os
import sys

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hyvideo.distributed.parallelize import _forward
from hyvideo.models.attention import Layout
from hyvideo.models.family import install
from hyvideo.models.lora import add_trainable_lora, training_config
from tests.planning.simulated import BLOCK_TEXT, BLOCK_TOKENS


def block_of(lora_rank: int) -> nn.Module:
    with torch.device("meta"):
        model = HunyuanVideo15Transformer3DModel(num_layers=2, num_refiner_layers=1)
        install(model)
        if lora_rank:
            add_trainable_lora(model, training_config(model, rank=lora_rank, alpha=lora_rank))
    return model.transformer_blocks[0]


def counted(lora_rank: int, *, with_gradient: bool, recompute: str = "none") -> dict[str, int]:
    """Return bytes allocated by operators: peak of the forward pass, kept after it, and peak of the
    backward pass.

    ``products`` and ``attention`` are FLOPs of both passes, counted by torch.
    """
    block = block_of(lora_rank)
    block.original_forward = block.forward
    with fake.fake_mode():
        fake.on_device(block, torch.bfloat16)

        def tensor(*shape: int) -> torch.Tensor:
            return torch.empty(
                *shape, dtype=torch.bfloat16, device="cuda", requires_grad=with_gradient
            )

        image, text = tensor(1, BLOCK_TOKENS, 2048), tensor(1, BLOCK_TEXT, 2048)
        tables = (torch.empty(BLOCK_TOKENS, 128, device="cuda") for _ in range(2))
        layout = Layout(*tables, (BLOCK_TEXT,), BLOCK_TOKENS)
        time = torch.empty(1, 2048, dtype=torch.bfloat16, device="cuda")
        upstream = tensor(1, BLOCK_TOKENS, 2048).detach(), tensor(1, BLOCK_TEXT, 2048).detach()

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            with torch.autocast("cuda", torch.bfloat16), torch.set_grad_enabled(with_gradient):
                return _forward(block, image, text, time, layout, recompute=recompute)

        with fake.Count() as count:
            outputs = forward()
            found = {"forward": count.peak, "kept": count.live}
            if with_gradient:
                count.clear()
                torch.autograd.backward(outputs, upstream)
                found["backward"] = count.peak
        with FlopCounterMode(display=False) as flops:  # separately, because it decomposes operators
            outputs = forward()
            if with_gradient:
                torch.autograd.backward(outputs, upstream)
    by_kind = {"products": 0, "attention": 0}
    for operator, flop in flops.get_flop_counts()["Global"].items():
        by_kind["attention" if "scaled_dot_product" in str(operator) else "products"] += flop
    return found | by_kind


if __name__ == "__main__":
    ways = {
        "sampled": {"with_gradient": False},
        "trained": {"with_gradient": True},
        "recomputed": {"with_gradient": True, "recompute": "full"},
        "selective": {"with_gradient": True, "recompute": "selective"},
    }
    kinds = {"all": 0, "lora": 32}
    print(
        json.dumps(
            {
                f"{kind} {way}": counted(rank, **how)
                for kind, rank in kinds.items()
                for way, how in ways.items()
            }
        )
    )
    sys.stdout.flush()
    os._exit(0)  # at a normal exit, torch's threads would access the device
