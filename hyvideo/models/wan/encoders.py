"""Encoders of Wan: UMT5-XXL, in ``text_encoder/`` and ``tokenizer/`` of diffusers' layout, and the
VAE for a first frame.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyvideo.data.images import fit, read_image, to_pixels
from hyvideo.models.encoders import (
    PromptEncoder,
    class_problems,
    find_tokenizer,
    load_model,
    load_tokenizer,
    rename_t5,
)
from hyvideo.models.family import Part
from hyvideo.models.wan.settings import TEXT_SLOTS, reads_given_video
from hyvideo.models.wan.vae import given_latents
from hyvideo.weights.weight_files import Folder

_MODEL = "UMT5EncoderModel"
_LABEL = "text encoder (UMT5-XXL in diffusers' layout, as in Wan-AI/Wan2.1-T2V-1.3B-Diffusers)"


class TextEncoder(PromptEncoder):
    """Encoder of prompts by UMT5: states of the cleaned prompt and the end token, without
    padding.
    """

    def _token_ids(self, prompt: str) -> list[int]:
        text = clean(prompt)
        ids = self.tokenizer(text, verbose=False).input_ids
        if len(ids) <= TEXT_SLOTS:
            return ids
        self._warn_of_truncation(len(ids), TEXT_SLOTS, ids[TEXT_SLOTS - 1 :])
        return self.tokenizer(text, truncation=True, max_length=TEXT_SLOTS).input_ids

    def _states(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).last_hidden_state


def clean(prompt: str) -> str:
    """Return the prompt cleaned as in the original: repaired by ftfy, HTML entities decoded,
    whitespace collapsed.

    Raises ValueError if ftfy is not installed; diffusers would silently skip this step.
    """
    from diffusers.pipelines.wan import pipeline_wan

    if not pipeline_wan.is_ftfy_available():
        raise ValueError(
            "Wan was trained on prompts cleaned by ftfy, which is not installed. Run: pip install "
            "ftfy"
        )
    return pipeline_wan.prompt_clean(prompt)


def load_text_encoder(
    root: str | Path, *, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> tuple[Any, nn.Module]:
    """Load the tokenizer and UMT5's encoder, frozen and in eval mode.

    Raises ValueError if a file does not fit.

    float16 is replaced with bfloat16, the original's dtype, because T5's gated layers can overflow
    in float16.
    """
    # tokenizer.json is used unchanged: T5Tokenizer of transformers 5 would rebuild it without byte
    # fallback and with T5's unknown token.
    tokenizer = load_tokenizer(_tokenizer_folder(Path(root)), "PreTrainedTokenizerFast")
    dtype = torch.bfloat16 if dtype == torch.float16 else dtype
    folder = Folder(Path(root) / "text_encoder", _LABEL)
    return tokenizer, load_model(_MODEL, folder, dtype=dtype, rename=rename_t5, **kwargs)


def _load(root: Path, *, transformer: Mapping[str, Any], vae: nn.Module, **kwargs: Any):
    encode = TextEncoder(*load_text_encoder(root, **kwargs))
    return lambda prompts, size: [{"states": states} for states in encode(prompts)]


def _load_image(root: Path, *, transformer: Mapping[str, Any], vae: nn.Module, **kwargs: Any):
    """Return the encoder of first frames, or of whole given videos if the transformer reads them."""

    def encode(paths: list[str], size: tuple[int, int, int]) -> list[dict[str, Tensor]]:
        frames, height, width = size
        images = (to_pixels(fit(read_image(path), height, width)) for path in paths)
        if reads_given_video(transformer):
            return [{"latents": given_latents(vae, image, frames)} for image in images]
        return [{"latents": given_latents(vae, image)[:, 0]} for image in images]

    return encode


def _problems(root: Path, weights_needed: bool = True) -> list[str]:
    _tokenizer_folder(root)
    return class_problems(
        _MODEL, Folder(root / "text_encoder", _LABEL), weights_needed, rename=rename_t5
    )


def _tokenizer_folder(root: Path) -> Path:
    folder = find_tokenizer(root / "tokenizer", _LABEL)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{_LABEL}: no tokenizer.json in {folder}; download it to this folder")
    return folder


PARTS = (
    Part(
        "text",
        lambda request: request.prompt,
        ("text_encoder", "tokenizer"),
        load=_load,
        problems=_problems,
    ),
    Part(
        "image",
        lambda request: request.image,
        (),
        load=_load_image,
        problems=lambda root, weights_needed=True: [],  # the VAE is checked in any case
        is_file=True,
    ),
)
