"""Prompts to conditions: Qwen2.5-VL hidden states, trimmed to what the model reads.

The chat template and its system message come from the installed diffusers at run time. Nothing is padded to the
1,000 slots of the original: the text encoder is causal, so padding on the right changes nothing (facts: 7e-7).
"""

import inspect
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_TEXT_TOKENS = 1000
GLYPH_WIDTH = 1472  # of ByT5's hidden states
_QUOTED = re.compile(r"\"(.*?)\"|“(.*?)”")


@dataclass(frozen=True)
class Conditions:
    """What the transformer is told about each video of a batch. Text is padded on the right to the longest."""

    text: Tensor  # (batch, tokens, dim)
    text_lengths: tuple[int, ...]  # valid tokens of each sample, known on the host
    glyph: Tensor  # (batch, glyph tokens, 1472)
    image_embeds: Tensor  # (batch, image tokens, dim); no tokens in text-to-video

    def __len__(self) -> int:
        return len(self.text_lengths)

    @property
    def text_is_full(self) -> bool:
        """Claims that no text is padded, so attention needs no mask."""
        return min(self.text_lengths) == self.text.shape[1]

    @property
    def text_mask(self) -> Tensor:
        """1 where a text token is valid. Shape: (batch, tokens)."""
        positions = torch.arange(self.text.shape[1])
        mask = positions < torch.tensor(self.text_lengths)[:, None]
        return mask.to(self.text.device, non_blocking=True)

    def select(self, rows: list[int]) -> "Conditions":
        """The samples of ``rows``, in that order, trimmed to the longest of them."""
        lengths = tuple(self.text_lengths[row] for row in rows)
        return Conditions(self.text[rows, : max(lengths)], lengths, self.glyph[rows], self.image_embeds[rows])

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Conditions":
        tensors = (self.text, self.glyph, self.image_embeds)
        text, glyph, image_embeds = (t.to(device, dtype, non_blocking=True) for t in tensors)
        return Conditions(text, self.text_lengths, glyph, image_embeds)

    @staticmethod
    def cat(parts: Iterable["Conditions"]) -> "Conditions":
        """One batch of several, padded to the longest text."""
        parts = list(parts)
        longest = max(part.text.shape[1] for part in parts)
        texts = [torch.nn.functional.pad(p.text, (0, 0, 0, longest - p.text.shape[1])) for p in parts]
        return Conditions(
            torch.cat(texts),
            tuple(length for part in parts for length in part.text_lengths),
            torch.cat([part.glyph for part in parts]),
            torch.cat([part.image_embeds for part in parts]),
        )


class PromptEncoder:
    """Encodes prompts with Qwen2.5-VL, each distinct prompt once.

    Args:
        tokenizer: Qwen2 tokenizer with a chat template.
        text_encoder: ``Qwen2_5_VLTextModel``; the output of its third layer from the end is used, without final norm.
        image_width: Width of the vision features that the transformer expects (it gets none in text-to-video).
    """

    def __init__(self, tokenizer, text_encoder, *, image_width: int):
        from diffusers import HunyuanVideo15Pipeline

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        signature = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds)
        self.system_message = signature.parameters["system_message"].default
        self.tokenizer = tokenizer
        self.text_encoder = text_encoder
        self.image_width = image_width
        self.crop_start = self._find_crop_start()
        self._cache: dict[str, Tensor] = {}

    def __call__(self, prompts: list[str]) -> Conditions:
        """Conditions of a batch, one row per prompt; repeated prompts cost nothing."""
        self._encode_missing(prompts)
        texts = [self._cache[prompt] for prompt in prompts]
        lengths = tuple(len(text) for text in texts)
        batch = len(prompts)
        return Conditions(
            text=torch.nn.utils.rnn.pad_sequence(texts, batch_first=True),
            text_lengths=lengths,
            glyph=texts[0].new_zeros(batch, 0, GLYPH_WIDTH),
            image_embeds=texts[0].new_zeros(batch, 0, self.image_width),
        )

    @torch.no_grad()
    def _encode_missing(self, prompts: list[str]) -> None:
        """Fills the cache, prompts of equal length together so that none is padded."""
        by_length: dict[int, list[tuple[str, list[int]]]] = {}
        for prompt in dict.fromkeys(prompts):
            if prompt not in self._cache:
                self._refuse_quoted_text(prompt)
                ids = self._token_ids(prompt)
                by_length.setdefault(len(ids), []).append((prompt, ids))
        for group in by_length.values():
            ids = torch.tensor([ids for _, ids in group], device=self.text_encoder.device)
            hidden = self.text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-3]
            for (prompt, _), states in zip(group, hidden[:, self.crop_start :].cpu()):
                self._cache[prompt] = states.clone()

    def _token_ids(self, prompt: str) -> list[int]:
        from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

        messages = format_text_input([prompt], self.system_message)
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return encoded["input_ids"][0][: self.crop_start + MAX_TEXT_TOKENS]

    def _find_crop_start(self) -> int:
        """Number of template tokens before the user's text: the common beginning of two different prompts."""
        self.crop_start = 10**9  # no truncation while it is unknown
        first, second = self._token_ids("a"), self._token_ids("b")
        crop = next(i for i, (x, y) in enumerate(zip(first, second)) if x != y)
        assert self.tokenizer.decode(first[:crop]).endswith("user\n"), "the crop must fall where the user's text begins"
        return crop

    @staticmethod
    def _refuse_quoted_text(prompt: str) -> None:
        if _QUOTED.search(prompt):
            raise ValueError(
                "text in double quotes is drawn through the ByT5 glyph encoder, which this version does not load yet; "
                f"remove the quotes from the prompt {prompt!r}"
            )
