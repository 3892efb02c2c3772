"""Frozen encoders of a checkpoint folder: language model, ByT5 for quoted text, SigLIP for
reference images.

    original                                         diffusers
    text_encoder/llm/                                text_encoder/, tokenizer/
    text_encoder/byt5-small/ (config, tokenizer)     text_encoder_2/, tokenizer_2/
    text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt
    vision_encoder/siglip/image_encoder/             image_encoder/
    vision_encoder/siglip/feature_extractor/         feature_extractor/

They are transformers classes, loaded by ``models.encoders``, which documents ``kwargs``.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyvideo.files.files import read_json
from hyvideo.models.encoders import (
    class_problems,
    find_tokenizer,
    load_model,
    load_tokenizer,
    read_config,
    rename_t5,
)
from hyvideo.weights import weight_files
from hyvideo.weights.weight_files import Folder, Weights, shapes_of, with_label

_TEXT_MODEL = "Qwen2_5_VLTextModel"
_GLYPH_MODEL = "T5EncoderModel"
_IMAGE_MODEL = "SiglipVisionModel"
_GLYPH_PREFIX = "module.text_tower.encoder."
# Tensor name prefixes in published checkpoints of Qwen2.5-VL's language model.
_TEXT_PREFIX = re.compile(r"^(model\.language_model|language_model\.model|language_model|model)\.")


def _rename_text(name: str) -> str:
    name = _TEXT_PREFIX.sub("", name)
    return "" if name.startswith(("visual.", "lm_head.")) else name


def _rename_image(name: str) -> str:
    if name.startswith(("text_model.", "logit_")):
        return ""
    return name.removeprefix("vision_model.")


def load_text_encoder(
    root: str | Path, *, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> tuple[Any, nn.Module]:
    """Load the tokenizer and the language model of Qwen2.5-VL, frozen and in eval mode, without the
    vision tower.

    Like the other loaders, raises ValueError if a file or a tensor is missing or does not fit.
    """
    folder, tokenizer = _text_encoder_folders(Path(root))
    return load_tokenizer(tokenizer), load_model(
        _TEXT_MODEL, folder, dtype=dtype, rename=_rename_text, **kwargs
    )


def load_glyph_encoder(
    root: str | Path, *, device: str | torch.device = "cpu", random_weights_seed: int | None = None
) -> tuple[Any, nn.Module]:
    """Load ByT5's tokenizer and the glyph-trained encoder, frozen, in float32 as in the original.

    ``byt5-small`` provides only configuration and tokenizer. The weights are those of
    Glyph-SDXL-v2, which also has special tokens for colors and fonts, such as <color-3>, that a
    prompt may contain.
    """
    folder, tokenizer_folder, weights = _glyph_folders(Path(root))
    tokenizer = load_tokenizer(tokenizer_folder)
    if random_weights_seed is not None or weights is None:
        model = load_model(
            _GLYPH_MODEL,
            folder,
            dtype=torch.float32,
            rename=rename_t5,
            device=device,
            random_weights_seed=random_weights_seed,
        )
        return tokenizer, model
    weight_files.raise_problems(folder, glyph_encoder_problems(root))
    tokenizer.add_tokens(_glyph_tokens(weights, folder.label), special_tokens=True)
    state = _glyph_state(weights, folder.label)
    with torch.random.fork_rng(devices=[]):
        model = _glyph_model(folder, state).float()
    model.encoder.load_state_dict(state, strict=True)
    return tokenizer, model.to(device).requires_grad_(False).eval()


def load_vision_encoder(
    root: str | Path, *, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> tuple[dict, nn.Module]:
    """Load SigLIP's preprocessor_config.json and vision model, frozen."""
    folder, preprocessor = _vision_folders(Path(root))
    values = read_json(preprocessor, folder.label)
    return values, load_model(_IMAGE_MODEL, folder, dtype=dtype, rename=_rename_image, **kwargs)


def text_encoder_problems(root: str | Path, weights_needed: bool = True) -> list[str]:
    """Return the problems that prevent loading the language model; other parts of Qwen2.5-VL are
    ignored.
    """
    return class_problems(
        _TEXT_MODEL, _text_encoder_folders(Path(root))[0], weights_needed, rename=_rename_text
    )


def glyph_encoder_problems(root: str | Path, weights_needed: bool = True) -> list[str]:
    """Return the problems that prevent loading the glyph encoder."""
    folder, _, pickled = _glyph_folders(Path(root))
    if pickled is None or not weights_needed:
        return class_problems(_GLYPH_MODEL, folder, weights_needed, rename=rename_t5)
    state = _glyph_state(pickled, folder.label, "meta")
    with torch.device("meta"):
        model = _glyph_model(folder, state)
    weights = Weights(shapes_of(state), dict.fromkeys(state, pickled))
    problems = weight_files.tensor_problems(folder, shapes_of(model.encoder.state_dict()), weights)
    _glyph_tokens(pickled, folder.label)
    return with_label(folder, problems)


def vision_encoder_problems(root: str | Path, weights_needed: bool = True) -> list[str]:
    """Return the problems that prevent loading the vision encoder; a text tower in the file is
    ignored.
    """
    folder, preprocessor = _vision_folders(Path(root))
    read_json(preprocessor, folder.label)
    return class_problems(_IMAGE_MODEL, folder, weights_needed, rename=_rename_image)


def _glyph_model(folder: Folder, state: Mapping[str, Tensor]) -> nn.Module:
    """Return a new model with the folder's config and the vocabulary size of the state dict."""
    from transformers import T5EncoderModel

    config = read_config(_GLYPH_MODEL, folder)
    config.vocab_size = len(state["embed_tokens.weight"])
    return T5EncoderModel(config)


def _glyph_tokens(weights: Path, label: str) -> list[str]:
    """Return the color tokens, then the font tokens, in embedding order; font tokens begin with a
    language code.
    """
    assets = weights.parent.parent / "assets"
    colors = read_json(assets / "color_idx.json", label)
    fonts = read_json(assets / "multilingual_10-lang_idx.json", label)
    return [f"<color-{i}>" for i in range(len(colors))] + [
        f"<{code[:2]}-font-{i}>" for code, i in fonts.items()
    ]


def _glyph_state(path: Path, label: str, device: str = "cpu") -> dict[str, Tensor]:
    """Return the encoder's tensors from the pickle of Glyph-SDXL-v2, under the names of
    transformers' T5Stack.
    """
    state = weight_files.read_pickle(path, label, device=device)
    encoder = {
        name.removeprefix(_GLYPH_PREFIX): t
        for name, t in state.items()
        if name.startswith(_GLYPH_PREFIX)
    }
    encoder = encoder or {name.removeprefix("encoder."): tensor for name, tensor in state.items()}
    if "shared.weight" in encoder:
        encoder.setdefault("embed_tokens.weight", encoder.pop("shared.weight"))
    if "embed_tokens.weight" not in encoder:
        raise ValueError(
            f"{label}: {path} has no ByT5 encoder: {_GLYPH_PREFIX}embed_tokens.weight is not among "
            f"its {len(state)} tensors"
        )
    return encoder


def _text_encoder_folders(root: Path) -> tuple[Folder, Path]:
    """Return the folders of the language model and of its tokenizer."""
    folder = tokenizer = root / "text_encoder" / "llm"
    if not folder.is_dir():
        folder = root / "text_encoder"
        tokenizer = root / "tokenizer"
    return Folder(folder, "text encoder"), find_tokenizer(tokenizer, "text encoder")


def _glyph_folders(root: Path) -> tuple[Folder, Path, Path | None]:
    """Return the folders of the configuration and tokenizer, and the weight file (None in
    diffusers' layout).
    """
    label = "glyph encoder (ByT5, for text in quotes)"
    if (root / "text_encoder_2").is_dir():
        return (
            Folder(root / "text_encoder_2", label),
            find_tokenizer(root / "tokenizer_2", label),
            None,
        )
    original = root / "text_encoder" / "byt5-small"
    weights = root / "text_encoder" / "Glyph-SDXL-v2" / "checkpoints" / "byt5_model.pt"
    return Folder(original, label), find_tokenizer(original, label), weights


def _vision_folders(root: Path) -> tuple[Folder, Path]:
    """Return the folder of the vision model and the path of SigLIP's preprocessor_config.json."""
    siglip = root / "vision_encoder" / "siglip"
    parent = siglip if siglip.is_dir() else root
    folder = Folder(parent / "image_encoder", "vision encoder (SigLIP, for reference images)")
    return folder, parent / "feature_extractor" / "preprocessor_config.json"
