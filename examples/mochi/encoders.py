"""Text encoder of Mochi: T5 v1.1 XXL, in ``text_encoder/`` and ``tokenizer/`` of diffusers'
layout.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyvideo.models.encoders import (
    PromptEncoder,
    class_problems,
    find_tokenizer,
    load_model,
    load_tokenizer,
    rename_t5,
)
from hyvideo.models.family import Part
from hyvideo.weights.weight_files import Folder

TEXT_SLOTS = 256  # maximum length of a text in tokens, including the end token
_MODEL = "T5EncoderModel"
_LABEL = "text encoder (T5 v1.1 XXL)"


class TextEncoder(PromptEncoder):
    """Encoder of prompts by T5: states of the prompt and the end token, without padding.

    diffusers pads to 256 tokens and masks them, which gives the valid tokens the same states.
    """

    def _token_ids(self, prompt: str) -> list[int]:
        ids = self.tokenizer(prompt, verbose=False).input_ids
        if len(ids) <= TEXT_SLOTS:
            return ids
        self._warn_of_truncation(len(ids), TEXT_SLOTS, ids[TEXT_SLOTS - 1 :])
        return self.tokenizer(prompt, truncation=True, max_length=TEXT_SLOTS).input_ids

    def _states(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).last_hidden_state


def load_text_encoder(
    root: str | Path, *, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> tuple[Any, nn.Module]:
    """Load the tokenizer and T5's encoder, frozen and in eval mode.

    float16 is replaced with bfloat16, because T5's gated layers can overflow in float16.
    """
    tokenizer = load_tokenizer(find_tokenizer(Path(root) / "tokenizer", _LABEL))
    dtype = torch.bfloat16 if dtype == torch.float16 else dtype
    folder = Folder(Path(root) / "text_encoder", _LABEL)
    return tokenizer, load_model(_MODEL, folder, dtype=dtype, rename=rename_t5, **kwargs)


def _load(root: Path, *, transformer: Mapping[str, Any], vae: nn.Module, **kwargs: Any):
    encode = TextEncoder(*load_text_encoder(root, **kwargs))
    return lambda prompts, size: [{"states": states} for states in encode(prompts)]


def _problems(root: Path, weights_needed: bool = True) -> list[str]:
    find_tokenizer(root / "tokenizer", _LABEL)
    folder = Folder(root / "text_encoder", _LABEL)
    return class_problems(_MODEL, folder, weights_needed, rename=rename_t5)


PARTS = (
    Part(
        "text",
        content=lambda request: request.prompt,
        folders=("text_encoder", "tokenizer"),
        load=_load,
        problems=_problems,
    ),
)
