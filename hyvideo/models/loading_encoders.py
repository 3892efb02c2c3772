"""The frozen encoders of a checkpoint folder: language model, ByT5 for glyphs, SigLIP for reference images.

    original                                         diffusers
    text_encoder/llm/                                text_encoder/, tokenizer/
    text_encoder/byt5-small/ (config, tokenizer)     text_encoder_2/, tokenizer_2/
    text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt
    vision_encoder/siglip/image_encoder/             image_encoder/
    vision_encoder/siglip/feature_extractor/         feature_extractor/

They are classes of transformers; strictness is ours: headers are compared with the class's tensors first.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hyvideo.models.weight_files import (
    Folder,
    Shapes,
    Weights,
    draw_tensor,
    labelled,
    read_header,
    read_json,
    read_pickle,
    refuse,
    shapes_of,
    tensor_problems,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen2_5_VLTextModel, SiglipVisionModel, T5EncoderModel

_WEIGHTS = "model"
_GLYPH_PREFIX = "module.text_tower.encoder."


def load_text_encoder(
    root: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    random_weights_seed: int | None = None,
) -> tuple["PreTrainedTokenizerBase", "Qwen2_5_VLTextModel"]:
    """The tokenizer and the language model of Qwen2.5-VL, frozen and in eval mode.

    The vision tower of a full Qwen2.5-VL checkpoint is left unread; its published names (``model.layers``)
    and the newer ones are both understood.

    Raises:
        ValueError: A file or a tensor is missing or does not fit, naming it.
    """
    from transformers import AutoTokenizer, Qwen2_5_VLTextModel

    folder, tokenizer_folder = _text_encoder_folders(Path(root))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    if random_weights_seed is None:
        refuse(folder, text_encoder_problems(root))
    return tokenizer, _frozen(Qwen2_5_VLTextModel, folder, dtype, device, random_weights_seed)


def load_glyph_encoder(
    root: str | Path, *, device: str | torch.device = "cpu", random_weights_seed: int | None = None
) -> tuple["PreTrainedTokenizerBase", "T5EncoderModel"]:
    """ByT5's tokenizer and encoder as trained on glyphs, frozen, in float32 as in the original.

    ``byt5-small`` gives configuration and tokenizer only; the weights are those of Glyph-SDXL-v2, which also has
    tokens for colours and fonts, reached by a prompt that spells one.

    Raises:
        ValueError: As `load_text_encoder`.
    """
    from transformers import AutoTokenizer, T5EncoderModel

    config_folder, tokenizer_folder, weights = _glyph_folders(Path(root))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    if random_weights_seed is None:
        refuse(config_folder, glyph_encoder_problems(root))
    if random_weights_seed is not None or weights is None:
        return tokenizer, _frozen(T5EncoderModel, config_folder, torch.float32, device, random_weights_seed)
    tokenizer.add_tokens(_glyph_tokens(weights.parent.parent / "assets", config_folder.label), special_tokens=True)
    state = _glyph_state(weights, config_folder.label)
    model = _glyph_model(_config(T5EncoderModel, config_folder), state).float()
    model.encoder.load_state_dict(state, strict=True)
    return tokenizer, model.to(device).requires_grad_(False).eval()


def load_vision_encoder(
    root: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    random_weights_seed: int | None = None,
) -> tuple[dict[str, Any], "SiglipVisionModel"]:
    """The values of SigLIP's preprocessor_config.json and its vision model, frozen.

    Raises:
        ValueError: As `load_text_encoder`.
    """
    from transformers import SiglipVisionModel

    folder, preprocessor_folder = _vision_folders(Path(root))
    preprocessor = read_json(preprocessor_folder / "preprocessor_config.json", folder.label)
    if random_weights_seed is None:
        refuse(folder, vision_encoder_problems(root))
    return preprocessor, _frozen(SiglipVisionModel, folder, dtype, device, random_weights_seed)


def preprocessor_file(root: str | Path) -> Path:
    """SigLIP's preprocessor_config.json."""
    return _vision_folders(Path(root))[1] / "preprocessor_config.json"


def text_encoder_problems(root: str | Path, weights_needed: bool = True) -> list[str]:
    """Problems that keep the language model from loading; the other parts of a full Qwen2.5-VL are none."""
    from transformers import Qwen2_5_VLTextModel

    folder, _ = _text_encoder_folders(Path(root))
    config = _config(Qwen2_5_VLTextModel, folder)
    if not weights_needed:
        return []
    expected = _expected_shapes(Qwen2_5_VLTextModel, config)
    weights = read_header(folder, _WEIGHTS)
    renamed = {_text_model_name(name): shape for name, shape in weights.shapes.items()}
    files = {_text_model_name(name): path for name, path in weights.files.items()}
    text_only = Weights({name: shape for name, shape in renamed.items() if name in expected}, files, drawn={})
    return labelled(folder, tensor_problems(folder, expected, text_only))


def glyph_encoder_problems(root: str | Path, weights_needed: bool = True) -> list[str]:
    """Problems that keep the glyph encoder from loading."""
    from transformers import T5EncoderModel

    folder, tokenizer, pickled = _glyph_folders(Path(root))
    config = _config(T5EncoderModel, folder)
    if not weights_needed:
        return []
    if pickled is not None:
        with torch.device("meta"):
            model = _glyph_model(config, _glyph_state(pickled, folder.label, "meta"))
        tokens = _glyph_tokens(pickled.parent.parent / "assets", folder.label)
        return _glyph_problems(model, folder, pickled) + _token_problems(tokens, tokenizer, model, folder)
    expected = _expected_shapes(T5EncoderModel, config)
    weights = read_header(folder, _WEIGHTS)
    # One table under two names: a file has it under either, or twice.
    names = {"shared.weight", "encoder.embed_tokens.weight"}
    stored = names & weights.shapes.keys() or {"shared.weight"}
    for name in names - stored:
        expected.pop(name, None)
    return labelled(folder, tensor_problems(folder, expected, weights))


def vision_encoder_problems(root: str | Path, weights_needed: bool = True) -> list[str]:
    """Problems that keep the vision encoder from loading; a text tower beside it is none."""
    from transformers import SiglipVisionModel

    folder, preprocessor_folder = _vision_folders(Path(root))
    config = _config(SiglipVisionModel, folder)
    read_json(preprocessor_folder / "preprocessor_config.json", folder.label)
    if not weights_needed:
        return []
    expected = _expected_shapes(SiglipVisionModel, config)
    weights = read_header(folder, _WEIGHTS)
    if not any(name in expected for name in weights.shapes):
        expected = {f"vision_model.{name}": shape for name, shape in expected.items()}
    vision_only = Weights(
        {name: shape for name, shape in weights.shapes.items() if name in expected}, weights.files, drawn={}
    )
    return labelled(folder, tensor_problems(folder, expected, vision_only))


def _expected_shapes(cls: type, config: Any) -> Shapes:
    with torch.device("meta"):
        return shapes_of(cls(config).state_dict())


def _frozen(
    cls: type, folder: Folder, dtype: torch.dtype, device: str | torch.device, random_weights_seed: int | None
) -> nn.Module:
    """The model of a folder, read or drawn, in eval mode."""
    if random_weights_seed is None:
        model = _pretrained(cls, folder, dtype, device)
    else:
        model = _randomly(cls, folder, random_weights_seed, dtype)
    # Not to(dtype): that would round the rotary frequencies, which stay float32 in a model of any dtype.
    return model.to(device).requires_grad_(False).eval()


def _pretrained(cls: type, folder: Folder, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
    """The model by ``from_pretrained``, which knows the names of old checkpoints; its files have been checked."""
    from transformers.utils import logging

    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would stand in the middle of ours
    model, report = cls.from_pretrained(
        folder.path,
        dtype=dtype,
        device_map={"": torch.device(device)},  # straight to a GPU: several processes share the host's memory
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    if shows_bars:
        logging.enable_progress_bar()
    assert not report["missing_keys"], report["missing_keys"]
    return model


def _randomly(cls: type, folder: Folder, seed: int, dtype: torch.dtype) -> nn.Module:
    """A model whose every weight is drawn by its name."""
    from accelerate import init_empty_weights

    # Buffers have memory: rotary frequencies are computed at construction and not in the state dict. The
    # initialisation of the weights has no effect and must not move the caller's random state.
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model = cls(_config(cls, folder))
    shapes = shapes_of(model.state_dict())
    state = {name: draw_tensor(seed, name, shape).to(dtype) for name, shape in shapes.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return model


def _glyph_model(config: Any, state: Mapping[str, Tensor]) -> "T5EncoderModel":
    """The model of a config, with a row for every token of the state."""
    from transformers import T5EncoderModel

    config.vocab_size = len(state["embed_tokens.weight"])
    with torch.random.fork_rng(devices=[]):
        return T5EncoderModel(config)


def _glyph_problems(model: "T5EncoderModel", folder: Folder, path: Path) -> list[str]:
    state = _glyph_state(path, folder.label, "meta")
    weights = Weights(shapes_of(state), dict.fromkeys(state, path), drawn={})
    return labelled(folder, tensor_problems(folder, shapes_of(model.encoder.state_dict()), weights))


def _token_problems(tokens: list[str], tokenizer: Path, model: "T5EncoderModel", folder: Folder) -> list[str]:
    """Problem of an embedding that has fewer rows than there are tokens."""
    from transformers import AutoTokenizer

    rows, num_plain = model.config.vocab_size, len(AutoTokenizer.from_pretrained(tokenizer, local_files_only=True))
    if num_plain + len(tokens) <= rows:
        return []
    return [f"{folder.label}: {num_plain} tokens and {len(tokens)} for colours and fonts are more than the {rows} rows"]


def _glyph_tokens(assets: Path, label: str) -> list[str]:
    """The tokens of colours, then of fonts, in the order of their rows; a font's begins with its language."""
    colours = read_json(assets / "color_idx.json", label)
    fonts = read_json(assets / "multilingual_10-lang_idx.json", label)
    return [f"<color-{i}>" for i in range(len(colours))] + [f"<{code[:2]}-font-{i}>" for code, i in fonts.items()]


def _glyph_state(path: Path, label: str, device: str = "cpu") -> dict[str, Tensor]:
    """The encoder's tensors in the pickle of Glyph-SDXL-v2, under T5Stack's names."""
    state = read_pickle(path, label, device=device)
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
    original = root / "text_encoder" / "byt5-small"
    if (root / "text_encoder_2").is_dir():
        return Folder(root / "text_encoder_2", label), _with_tokenizer(root / "tokenizer_2", label), None
    weights = root / "text_encoder" / "Glyph-SDXL-v2" / "checkpoints" / "byt5_model.pt"
    return Folder(original, label), _with_tokenizer(original, label), weights


def _vision_folders(root: Path) -> tuple[Folder, Path]:
    label = "vision encoder (SigLIP, for reference images)"
    siglip = root / "vision_encoder" / "siglip"
    if siglip.is_dir():
        return Folder(siglip / "image_encoder", label), siglip / "feature_extractor"
    return Folder(root / "image_encoder", label), root / "feature_extractor"


def _with_tokenizer(folder: Path, label: str) -> Path:
    if not (folder / "tokenizer_config.json").is_file():
        raise ValueError(f"{label}: no tokenizer_config.json in {folder}; download or build it there")
    for name in ("tokenizer_config.json", "tokenizer.json"):  # the library takes any JSON and fails inside
        if (folder / name).is_file():
            read_json(folder / name, label)
    return folder


def _config(cls: type, folder: Folder) -> Any:
    read_json(folder.path / "config.json", folder.label)
    return cls.config_class.from_pretrained(folder.path, local_files_only=True)


def _text_model_name(name: str) -> str:
    """The name in Qwen2_5_VLTextModel of a tensor of Qwen2.5-VL, published under several prefixes."""
    for prefix in ("model.language_model.", "language_model.model.", "language_model.", "model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
