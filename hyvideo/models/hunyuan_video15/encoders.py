"""The frozen encoders of a checkpoint folder: language model, ByT5 for glyphs, SigLIP for reference images.

    original                                         diffusers
    text_encoder/llm/                                text_encoder/, tokenizer/
    text_encoder/byt5-small/ (config, tokenizer)     text_encoder_2/, tokenizer_2/
    text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt
    vision_encoder/siglip/image_encoder/             image_encoder/
    vision_encoder/siglip/feature_extractor/         feature_extractor/

They are classes of transformers; strictness is ours: headers are compared with the class's tensors first.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hyvideo.models import weight_files
from hyvideo.models.weight_files import Folder, Weights, labelled, shapes_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen2_5_VLTextModel, SiglipVisionModel, T5EncoderModel

_GLYPH_PREFIX = "module.text_tower.encoder."
# Prefixes under which the language model of Qwen2.5-VL was published.
_TEXT_PREFIX = re.compile(r"^(model\.language_model|language_model\.model|language_model|model)\.")
# Takes from a tensor's name what differs between the files of a class.
_PLAIN_NAMES: dict[str, Callable[[str], str]] = {
    "Qwen2_5_VLTextModel": lambda name: _TEXT_PREFIX.sub("", name),
    # One table under two names: a file has it under either, or twice.
    "T5EncoderModel": lambda name: "shared.weight" if name == "encoder.embed_tokens.weight" else name,
    "SiglipVisionModel": lambda name: name.removeprefix("vision_model."),
}


def load_text_encoder(
    root: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    random_weights_seed: int | None = None,
) -> tuple["PreTrainedTokenizerBase", "Qwen2_5_VLTextModel"]:
    """The tokenizer and the language model of Qwen2.5-VL, frozen and in eval mode.

    The vision tower of a full checkpoint is left unread. Raises ValueError for a file or a tensor that is missing or
    does not fit, as the others do.
    """
    from transformers import AutoTokenizer, Qwen2_5_VLTextModel

    folder, tokenizer_folder = _text_encoder_folders(Path(root))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    return tokenizer, _frozen(Qwen2_5_VLTextModel, folder, dtype, device, random_weights_seed)


def load_glyph_encoder(
    root: str | Path, *, device: str | torch.device = "cpu", random_weights_seed: int | None = None
) -> tuple["PreTrainedTokenizerBase", "T5EncoderModel"]:
    """ByT5's tokenizer and encoder as trained on glyphs, frozen, in float32 as in the original.

    ``byt5-small`` gives configuration and tokenizer only; the weights are those of Glyph-SDXL-v2, which also has
    tokens for colours and fonts, reached by a prompt that spells one.
    """
    from transformers import AutoTokenizer, T5EncoderModel

    folder, tokenizer_folder, weights = _glyph_folders(Path(root))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    if random_weights_seed is not None or weights is None:
        return tokenizer, _frozen(T5EncoderModel, folder, torch.float32, device, random_weights_seed)
    weight_files.refuse(folder, glyph_encoder_problems(root))
    tokenizer.add_tokens(_glyph_tokens(weights, folder.label), special_tokens=True)
    state = _glyph_state(weights, folder.label)
    with torch.random.fork_rng(devices=[]):
        model = _glyph_model(folder, state).float()
    model.encoder.load_state_dict(state, strict=True)
    return tokenizer, model.to(device).requires_grad_(False).eval()


def load_vision_encoder(
    root: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    random_weights_seed: int | None = None,
) -> tuple[dict[str, Any], "SiglipVisionModel"]:
    """The values of SigLIP's preprocessor_config.json and its vision model, frozen."""
    from transformers import SiglipVisionModel

    folder, preprocessor = _vision_folders(Path(root))
    values = weight_files.read_json(preprocessor, folder.label)
    return values, _frozen(SiglipVisionModel, folder, dtype, device, random_weights_seed)


def preprocessor_file(root: str | Path) -> Path:
    """SigLIP's preprocessor_config.json."""
    return _vision_folders(Path(root))[1]


def text_encoder_problems(root: str | Path, weights_needed: bool = True) -> list[str]:
    """Problems that keep the language model from loading; the other parts of a full Qwen2.5-VL are none."""
    from transformers import Qwen2_5_VLTextModel

    return class_problems(Qwen2_5_VLTextModel, _text_encoder_folders(Path(root))[0], weights_needed)


def glyph_encoder_problems(root: str | Path, weights_needed: bool = True) -> list[str]:
    """Problems that keep the glyph encoder from loading."""
    from transformers import AutoTokenizer, T5EncoderModel

    folder, tokenizer, pickled = _glyph_folders(Path(root))
    if pickled is None or not weights_needed:
        return class_problems(T5EncoderModel, folder, weights_needed)
    state = _glyph_state(pickled, folder.label, "meta")
    with torch.device("meta"):
        model = _glyph_model(folder, state)
    weights = Weights(shapes_of(state), dict.fromkeys(state, pickled), drawn={})
    problems = weight_files.tensor_problems(folder, shapes_of(model.encoder.state_dict()), weights)
    num_plain = len(AutoTokenizer.from_pretrained(tokenizer, local_files_only=True))
    num_added, rows = len(_glyph_tokens(pickled, folder.label)), model.config.vocab_size
    if num_plain + num_added > rows:
        problems.append(f"{num_plain} tokens and {num_added} for colours and fonts are more than the {rows} rows")
    return labelled(folder, problems)


def vision_encoder_problems(root: str | Path, weights_needed: bool = True) -> list[str]:
    """Problems that keep the vision encoder from loading; a text tower beside it is none."""
    from transformers import SiglipVisionModel

    folder, preprocessor = _vision_folders(Path(root))
    weight_files.read_json(preprocessor, folder.label)
    return class_problems(SiglipVisionModel, folder, weights_needed)


def class_problems(cls: type, folder: Folder, weights_needed: bool = True) -> list[str]:
    """Problems that keep a class of transformers from loading a folder; tensors of other models in it are none."""
    config, plain = _config(cls, folder), _PLAIN_NAMES.get(cls.__name__, str)
    if not weights_needed:
        return []
    with torch.device("meta"):
        expected = {plain(name): shape for name, shape in shapes_of(cls(config).state_dict()).items()}
    header = weight_files.read_header(folder, "model")
    shapes = {plain(name): shape for name, shape in header.shapes.items() if plain(name) in expected}
    files = {plain(name): path for name, path in header.files.items()}
    return labelled(folder, weight_files.tensor_problems(folder, expected, Weights(shapes, files, drawn={})))


def _frozen(cls: type, folder: Folder, dtype: torch.dtype, device: str | torch.device, seed: int | None) -> nn.Module:
    """The model of a folder, read or drawn, in eval mode. Raises ValueError where its files do not fit."""
    if seed is None:
        weight_files.refuse(folder, class_problems(cls, folder))
    model = _pretrained(cls, folder, dtype, device) if seed is None else _randomly(cls, folder, seed, dtype, device)
    # Not to(dtype): that would round the rotary frequencies, which stay float32 in a model of any dtype.
    return model.to(device).requires_grad_(False).eval()


def _pretrained(cls: type, folder: Folder, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
    """The model by ``from_pretrained``, which knows the names of old checkpoints; its files have been checked."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would stand in the middle of ours
    model, report = cls.from_pretrained(
        folder.path,
        dtype=dtype,
        device_map={"": torch.device(device)},  # straight to a GPU: several processes share the host's memory
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    assert not report["missing_keys"], report["missing_keys"]
    return model


def _randomly(cls: type, folder: Folder, seed: int, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
    """A model whose every weight is drawn by its name."""
    from accelerate import init_empty_weights

    # Buffers have memory: rotary frequencies are computed at construction and not in the state dict. The
    # initialisation of the weights has no effect and must not move the caller's random state.
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model = cls(_config(cls, folder))
    weights = weight_files.draw_tensors(seed, shapes_of(model.state_dict()), device)
    model.load_state_dict({name: weight.to(dtype) for name, weight in weights}, strict=True, assign=True)
    return model


def _glyph_model(folder: Folder, state: Mapping[str, Tensor]) -> "T5EncoderModel":
    """The model of a config, with a row for every token of the state."""
    from transformers import T5EncoderModel

    config = _config(T5EncoderModel, folder)
    config.vocab_size = len(state["embed_tokens.weight"])
    return T5EncoderModel(config)


def _glyph_tokens(weights: Path, label: str) -> list[str]:
    """The tokens of colours, then of fonts, in the order of their rows; a font's begins with its language."""
    assets = weights.parent.parent / "assets"
    colours = weight_files.read_json(assets / "color_idx.json", label)
    fonts = weight_files.read_json(assets / "multilingual_10-lang_idx.json", label)
    return [f"<color-{i}>" for i in range(len(colours))] + [f"<{code[:2]}-font-{i}>" for code, i in fonts.items()]


def _glyph_state(path: Path, label: str, device: str = "cpu") -> dict[str, Tensor]:
    """The encoder's tensors in the pickle of Glyph-SDXL-v2, under T5Stack's names."""
    state = weight_files.read_pickle(path, label, device=device)
    encoder = {name.removeprefix(_GLYPH_PREFIX): t for name, t in state.items() if name.startswith(_GLYPH_PREFIX)}
    encoder = encoder or {name.removeprefix("encoder."): tensor for name, tensor in state.items()}
    if "shared.weight" in encoder:
        encoder.setdefault("embed_tokens.weight", encoder.pop("shared.weight"))
    if "embed_tokens.weight" not in encoder:
        raise ValueError(
            f"{label}: {path} holds no ByT5 encoder: no tensor {_GLYPH_PREFIX}embed_tokens.weight among {len(state)}"
        )
    return encoder


def _text_encoder_folders(root: Path) -> tuple[Folder, Path]:
    """Folders of the language model and of its tokenizer."""
    llm = root / "text_encoder" / "llm"
    folder, tokenizer = (llm, llm) if llm.is_dir() else (root / "text_encoder", root / "tokenizer")
    return Folder(folder, "text encoder"), _with_tokenizer(tokenizer, "text encoder")


def _glyph_folders(root: Path) -> tuple[Folder, Path, Path | None]:
    """Folders of configuration and tokenizer, and the original's file of weights."""
    label = "glyph encoder (ByT5, for text in quotes)"
    if (root / "text_encoder_2").is_dir():
        return Folder(root / "text_encoder_2", label), _with_tokenizer(root / "tokenizer_2", label), None
    original = root / "text_encoder" / "byt5-small"
    weights = root / "text_encoder" / "Glyph-SDXL-v2" / "checkpoints" / "byt5_model.pt"
    return Folder(original, label), _with_tokenizer(original, label), weights


def _vision_folders(root: Path) -> tuple[Folder, Path]:
    """Folder of the vision model, and SigLIP's preprocessor_config.json."""
    siglip = root / "vision_encoder" / "siglip"
    model, preprocessor = (siglip / "image_encoder", siglip) if siglip.is_dir() else (root / "image_encoder", root)
    label = "vision encoder (SigLIP, for reference images)"
    return Folder(model, label), preprocessor / "feature_extractor" / "preprocessor_config.json"


def _with_tokenizer(folder: Path, label: str) -> Path:
    if not (folder / "tokenizer_config.json").is_file():
        raise ValueError(f"{label}: no tokenizer_config.json in {folder}; download or build it there")
    for name in ("tokenizer_config.json", "tokenizer.json"):  # the library takes any JSON and fails inside
        if (folder / name).is_file():
            weight_files.read_json(folder / name, label)
    return folder


def _config(cls: type, folder: Folder) -> Any:
    weight_files.read_json(folder.path / "config.json", folder.label)
    return cls.config_class.from_pretrained(folder.path, local_files_only=True)
