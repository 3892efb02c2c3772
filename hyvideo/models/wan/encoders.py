"""Encoders of Wan: UMT5-XXL, in ``text_encoder/`` and ``tokenizer/`` of diffusers' layout, the VAE
for a first frame, and for Wan2.1 image-to-video also CLIP ViT-H, in ``image_encoder/`` and
``image_processor/``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from hyvideo.data.images import fit, read_image, to_pixels
from hyvideo.files.files import read_json
from hyvideo.models.config_file import read_config
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
from hyvideo.models.wan.vae import given_latents, with_mask
from hyvideo.weights.weight_files import Folder

_MODEL = "UMT5EncoderModel"
_LABEL = "text encoder (UMT5-XXL in diffusers' layout, as in Wan-AI/Wan2.1-T2V-1.3B-Diffusers)"
_CLIP = "CLIPVisionModel"
_CLIP_LABEL = (
    "image encoder (CLIP in diffusers' layout, as in Wan-AI/Wan2.1-I2V-14B-480P-Diffusers)"
)


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


class PictureFeatures:
    """Encoder of a picture into the states of CLIP that Wan2.1 image-to-video attends to: those
    after the last but one layer, of the class token and all patches.

    ``preprocessor`` is the content of preprocessor_config.json. The picture is resized and cropped to
    its center as in diffusers' pipeline; the original program squeezes the whole picture to a square.
    """

    def __init__(self, preprocessor: Mapping[str, Any], model: nn.Module):
        from transformers import CLIPImageProcessorPil  # needs no torchvision

        self.processor = CLIPImageProcessorPil.from_dict(dict(preprocessor))
        self.model = model

    @torch.no_grad()
    def __call__(self, picture: Image.Image) -> Tensor:
        """Return the states on the CPU. Shape: (tokens, dim)."""
        pixels = self.processor(images=picture, return_tensors="pt").pixel_values
        pixels = pixels.to(self.model.device, self.model.dtype)
        return self.model(pixels, output_hidden_states=True).hidden_states[-2][0].cpu()


def load_clip(root: Path, *, dtype: torch.dtype = torch.float32, **kwargs: Any) -> PictureFeatures:
    """Load CLIP's vision model, frozen, and its preprocessor_config.json.

    Raises ValueError if a file is missing or does not fit.
    """
    folder = Folder(root / "image_encoder", _CLIP_LABEL)
    preprocessor = read_json(_preprocessor_file(root), _CLIP_LABEL)
    model = load_model(_CLIP, folder, dtype=dtype, rename=_rename_clip, **kwargs)
    return PictureFeatures(preprocessor, model)


def _rename_clip(name: str) -> str:
    return name.removeprefix("vision_model.")


def _load_image(
    root: Path,
    *,
    transformer: Mapping[str, Any],
    vae: nn.Module,
    dtype: torch.dtype,
    device: str | torch.device,
    random_weights_seed: int | None,
    **kwargs: Any,
):
    """Return the encoder of first frames, or of whole given videos if the transformer reads them,
    with the features of the given frames if it reads those.
    """
    features = None
    if transformer["image_dim"]:
        features = load_clip(
            root, dtype=dtype, device=device, random_weights_seed=random_weights_seed
        )

    def encode(
        contents: list[tuple[str, ...]], size: tuple[int, int, int]
    ) -> list[dict[str, Tensor]]:
        frames, height, width = size
        encoded = []
        for paths in contents:
            pictures = [fit(read_image(path), height, width) for path in paths]
            first, *last = map(to_pixels, pictures)
            if reads_given_video(transformer):
                given = given_latents(vae, first, frames, *last)
                part = {"latents": with_mask(given, has_last_frame=bool(last))}
            else:
                part = {"latents": given_latents(vae, first)[:, 0]}
            if features:
                part["embeds"] = torch.cat([features(picture) for picture in pictures])
            encoded.append(part)
        return encoded

    return encode


def _image_problems(root: Path, weights_needed: bool = True) -> list[str]:
    """Return the problems of CLIP, if the transformer reads its features; the VAE is checked in any
    case.
    """
    paths = [root / "config.json", *(root / "transformer").rglob("config.json")]
    if not any(_reads_features(path.parent) for path in paths if path.is_file()):
        return []
    _preprocessor_file(root)
    folder = Folder(root / "image_encoder", _CLIP_LABEL)
    return class_problems(_CLIP, folder, weights_needed, rename=_rename_clip)


def _reads_features(folder: Path) -> bool:
    config = read_config(folder, "transformer")
    return bool(config.get("image_dim") or config.get("model_type") == "flf2v")


def _preprocessor_file(root: Path) -> Path:
    path = root / "image_processor" / "preprocessor_config.json"
    if not path.is_file():
        raise ValueError(f"{_CLIP_LABEL}: file not found: {path}; download the folder")
    return path


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
        lambda request: request.images or None,
        ("image_encoder", "image_processor"),
        load=_load_image,
        problems=_image_problems,
        is_file=True,
    ),
)
