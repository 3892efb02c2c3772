"""Inputs of the reward model: the chat in which the picture or video comes before the question."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hyvideo.rewards.qwen2_vl.preprocessing import MERGE

# token that stands for a part of the medium, and names of its patches and grid in transformers
MEDIA = {
    "image": ("<|image_pad|>", "pixel_values", "image_grid_thw"),
    "video": ("<|video_pad|>", "pixel_values_videos", "video_grid_thw"),
}
_HEAD = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
)
_TAIL = "<|im_end|>\n<|im_start|>assistant\n"


def chat(medium: str, num_tokens: int, question: str) -> str:
    """Return the text of a chat with an image or video of ``num_tokens`` tokens and a question."""
    return f"{_HEAD}{MEDIA[medium][0] * num_tokens}<|vision_end|>{question}{_TAIL}"


def model_inputs(
    tokenizer,
    medium: str,
    patches: Sequence[tuple[Tensor, tuple[int, int, int]]],
    questions: Sequence[str],
    device: str | torch.device,
) -> dict[str, Tensor]:
    """Return the inputs of `RewardModel` for a batch, padded on the right.

    ``patches`` are results of `preprocessing.patches`.
    """
    texts = []
    for (_, grid), question in zip(patches, questions, strict=True):
        texts.append(chat(medium, grid[0] * grid[1] * grid[2] // MERGE**2, question))
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    _, pixels_name, grid_name = MEDIA[medium]
    return {
        "input_ids": tokens.input_ids.to(device),
        "attention_mask": tokens.attention_mask.to(device),
        pixels_name: torch.cat([values for values, _ in patches]),
        grid_name: torch.tensor([grid for _, grid in patches], device=device),
    }


def load_tokenizer(folder, reward_tokens: Sequence[str]):
    """Return the tokenizer in a folder, with the reward tokens, which are added if they are new."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right", local_files_only=True)
    tokenizer.add_special_tokens({"extra_special_tokens": list(reward_tokens)})
    return tokenizer
