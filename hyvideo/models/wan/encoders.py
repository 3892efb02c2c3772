"""The text encoder of Wan: UMT5-XXL, in ``text_encoder/`` and ``tokenizer/`` of diffusers' layout."""

import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyvideo.data.outside import shown
from hyvideo.models.encoders import class_problems, frozen, of_equal_length, with_tokenizer
from hyvideo.models.family import Part
from hyvideo.models.weight_files import Folder

MAX_TOKENS = 512  # with the end token; the transformer pads to as many
_LABEL = "text encoder (UMT5-XXL in diffusers' layout, as in Wan-AI/Wan2.1-T2V-1.3B-Diffusers)"
_OUTSIDE_PLAIN_TEXT = re.compile(r"[^\t\n\r -%'-~]")  # "&" begins an HTML entity


class TextEncoder:
    """Hidden states of UMT5 as Wan reads them: of the cleaned prompt and the end token, without padding."""

    def __init__(self, tokenizer, model: nn.Module):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.tokenizer, self.model = tokenizer, model

    @torch.no_grad()
    def __call__(self, prompts: list[str]) -> list[Tensor]:
        """Return the states of each prompt, on the CPU. Shape of each: (tokens, dim)."""
        token_ids = [self._token_ids(clean(prompt)) for prompt in prompts]
        states: dict[int, Tensor] = {}
        for batch in of_equal_length(token_ids):
            ids = torch.tensor([token_ids[i] for i in batch], device=self.model.device)
            hidden = self.model(input_ids=ids).last_hidden_state.cpu()
            states |= {i: row.clone() for i, row in zip(batch, hidden)}
        return [states[i] for i in range(len(prompts))]

    def _token_ids(self, text: str) -> list[int]:
        ids = self.tokenizer(text, verbose=False).input_ids
        if len(ids) <= MAX_TOKENS:
            return ids
        cut = self.tokenizer.decode(ids[MAX_TOKENS - 1 :], skip_special_tokens=True)
        warnings.warn(
            f"a prompt has {len(ids)} tokens, the model reads {MAX_TOKENS}; left out from the end: {shown(cut)}",
            stacklevel=2,
        )
        return self.tokenizer(text, truncation=True, max_length=MAX_TOKENS).input_ids


def clean(prompt: str) -> str:
    """Return the prompt as the original cleans it: repaired by ftfy, without HTML entities and repeated whitespace.

    Raises ValueError where ftfy is missing and would be needed: diffusers then leaves its step out.
    """
    from diffusers.pipelines.wan import pipeline_wan

    if _OUTSIDE_PLAIN_TEXT.search(prompt) and not pipeline_wan.is_ftfy_available():
        raise ValueError(
            "Wan was trained on prompts that ftfy has repaired, and this one has characters that ftfy may change: "
            f"{shown(prompt)}. Run: pip install ftfy"
        )
    return pipeline_wan.prompt_clean(prompt)


def load_text_encoder(root: str | Path, *, dtype: torch.dtype = torch.float32, **how: Any) -> tuple[Any, nn.Module]:
    """Return the tokenizer and UMT5's encoder, frozen and in eval mode.

    Float16 gives bfloat16, the precision of the original: products within T5's gated layers can overflow in float16.
    Raises ValueError for a file or a tensor that is missing or does not fit.
    """
    from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

    # tokenizer.json as it is: T5Tokenizer of transformers 5 would rebuild it without byte fallback, and with the
    # unknown token of T5.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(_tokenizer_folder(Path(root)), local_files_only=True)
    dtype = torch.bfloat16 if dtype == torch.float16 else dtype
    return tokenizer, frozen(UMT5EncoderModel, _folder(root), dtype=dtype, plain=_plain, **how)


def _load(root: Path, *, vae: nn.Module, **how: Any):
    encode = TextEncoder(*load_text_encoder(root, **how))
    return lambda prompts, *size: [{"states": states} for states in encode(prompts)]


def _problems(root: Path, weights_needed: bool = True) -> list[str]:
    from transformers import UMT5EncoderModel

    _tokenizer_folder(root)
    return class_problems(UMT5EncoderModel, _folder(root), weights_needed, plain=_plain)


def _folder(root: str | Path) -> Folder:
    return Folder(Path(root) / "text_encoder", _LABEL)


def _tokenizer_folder(root: Path) -> Path:
    folder = with_tokenizer(root / "tokenizer", _LABEL)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{_LABEL}: no tokenizer.json in {folder}; download it there")
    return folder


def _plain(name: str) -> str:
    """Return one name for the table of tokens, which a file may have under either of two."""
    return "shared.weight" if name == "encoder.embed_tokens.weight" else name


PARTS = (
    Part(
        "text",
        content=lambda request: request.prompt,
        folders=("text_encoder", "tokenizer"),
        load=_load,
        problems=_problems,
    ),
)
