"""Qwen2-VL of a released size with random weights, for reward models with the tokenizer of the
miniature.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from tests.cuda.workload import DEVICE

SPECIAL_TOKENS = (
    "vocab_size",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)


def enlarge(path: Path, released: Path) -> tuple[int, dict[str, Tensor]]:
    """Give a tiny model's config.json the sizes in the file ``released``, except the vocabulary.

    Returns the width of the language model, and random weights in bf16 by name.
    """
    from transformers import Qwen2VLConfig, Qwen2VLModel

    known = json.loads(path.read_text())
    config = json.loads(released.read_text()) | {name: known[name] for name in SPECIAL_TOKENS}
    path.write_text(json.dumps(config))
    with torch.device("meta"):
        model = Qwen2VLModel(Qwen2VLConfig.from_dict(config))
    weights = {
        name: 0.02 * torch.randn(tensor.shape, device=DEVICE, dtype=torch.bfloat16)
        for name, tensor in model.state_dict().items()
    }
    return config["hidden_size"], weights
