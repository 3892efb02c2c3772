"""Memory of a block of each size on a simulated GPU, as JSON:
``python -m tests.models.wan.counted_block``.

Reports the peak and saved bytes of the forward pass and the peak of the backward pass, for one
sample and branch of 81 frames of 480 x 832.
"""

import tests.fake_cuda.device as fake  # isort: skip - before torch looks for CUDA

import json
import os
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyvideo.models.attention import Layout
from hyvideo.models.family import install, new_model
from hyvideo.models.lora import add_trainable_lora, training_config
from hyvideo.models.wan.block import Context
from hyvideo.models.wan.settings import TEXT_SLOTS
from tests.models.wan.tiny import FAMILY

TOKENS = 21 * 30 * 52
WIDTHS = {
    "wan2.1_t2v_1.3b": (12, 8960),
    "wan2.1_t2v_14b": (40, 13824),
    "wan2.2_ti2v_5b": (24, 14336),
}


def block_of(version: str, lora_rank: int) -> nn.Module:
    heads, hidden = WIDTHS[version]
    with torch.device("meta"):
        model = new_model(
            FAMILY.transformer, {"num_layers": 1, "num_attention_heads": heads, "ffn_dim": hidden}
        )
        install(model)
        if lora_rank:
            add_trainable_lora(model, training_config(model, rank=lora_rank, alpha=lora_rank))
    return model.blocks[0]


def counted(
    version: str, lora_rank: int, *, with_gradient: bool, recompute: bool = False
) -> dict[str, int]:
    """Return the bytes that operators allocate: peak of the forward pass, saved after it, peak of
    the backward pass.
    """
    block = block_of(version, lora_rank)
    width = WIDTHS[version][0] * 128
    with fake.fake_mode():
        fake.on_device(block, torch.bfloat16)

        def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="cuda", requires_grad=with_gradient)

        tables = (torch.empty(TOKENS, 128, device="cuda") for _ in range(2))
        layout = Layout(*tables, (0,), TOKENS)
        arguments = (
            tensor(1, TOKENS, width),
            Context(tensor(1, TEXT_SLOTS, width), pictures=None),
            tensor(1, 6, width, dtype=torch.float32),
            layout,
        )
        upstream = tensor(1, TOKENS, width).detach()
        with fake.Count() as count:
            with torch.autocast("cuda", torch.bfloat16), torch.set_grad_enabled(with_gradient):
                tokens = (
                    checkpoint(block, *arguments, use_reentrant=False)
                    if recompute
                    else block(*arguments)
                )
            found = {"forward": count.peak, "kept": count.live}
            if with_gradient:
                count.clear()
                tokens.backward(upstream)
                found["backward"] = count.peak
    return found


if __name__ == "__main__":
    modes = {
        "sampled": {"with_gradient": False},
        "trained": {"with_gradient": True},
        "recomputed": {"with_gradient": True, "recompute": True},
    }
    found = {
        f"{version} {kind} {mode}": counted(version, rank, **options)
        for version in WIDTHS
        for kind, rank in {"all": 0, "lora": 32}.items()
        for mode, options in modes.items()
    }
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # a normal exit would run torch's cleanup of the simulated device
