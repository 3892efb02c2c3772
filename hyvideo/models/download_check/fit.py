"""Whether the whole files of a part fit the model they are for: names, shapes and settings, from headers alone.

Each function takes the checkpoint folder and gives what does not fit, in sentences. The loaders' own checks are used
where there are some, so that this report and the start of a run agree.
"""

import pickle
from pathlib import Path

import torch

from hyvideo.models.weight_files import Folder, Weights, read_header, read_json, shapes_of, shortened, tensor_problems

Shapes = dict[str, tuple[int, ...]]


def nothing(root: Path) -> list[str]:
    """For parts whose files say all by being there and whole."""
    return []


def transformer_problems(root: Path, version: str | None) -> list[str]:
    """Of ``transformer/<version>``, or of the one transformer of the diffusers layout."""
    from hyvideo.models.fit_checks import transformer_problems

    return transformer_problems(root, version)


def vae_problems(root: Path) -> list[str]:
    from hyvideo.models.fit_checks import vae_problems

    return vae_problems(root)


def text_encoder_problems(root: Path) -> list[str]:
    from hyvideo.models.loading_encoders import text_encoder_problems

    return text_encoder_problems(root) if _has_tokenizer(root, "text_encoder/llm", "tokenizer") else []


def glyph_encoder_problems(root: Path) -> list[str]:
    """Of ``byt5_model.pt``, whose tensors are looked at on the meta device, or of diffusers' text_encoder_2."""
    from hyvideo.models.loading_encoders import glyph_encoder_problems

    pickled = root / "text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt"
    if pickled.is_file() and not any(name.endswith("embed_tokens.weight") for name in pickled_shapes(pickled)):
        return [f"{pickled} holds no ByT5 encoder: none of its tensors is embed_tokens.weight"]
    return glyph_encoder_problems(root) if _has_tokenizer(root, "text_encoder/byt5-small", "tokenizer_2") else []


def vision_encoder_problems(root: Path) -> list[str]:
    from hyvideo.models.loading_encoders import vision_encoder_problems

    return vision_encoder_problems(root)


def videoalign_problems(root: Path) -> list[str]:
    """Of the newest VideoAlign checkpoint: the heads and the LoRA against model_config.json.

    The base model's config is not part of the download, so the other shapes are compared when it is loaded.
    """
    folder = root / "VideoReward"
    config = read_json(folder / "model_config.json", "VideoAlign")
    if missing := [key for key in ("data_config", "model_config", "peft_lora_config") if key not in config]:
        return [f"{folder / 'model_config.json'} has no {', '.join(missing)}"]
    checkpoint = max(folder.glob("checkpoint-*"), key=_step)
    weights = checkpoint / "model.pth"
    if not weights.is_file():
        weights = checkpoint / "non_lora_state_dict.pth"
        if not weights.is_file():
            return [f"{checkpoint} is the newest checkpoint and has neither model.pth nor {weights.name}"]
    shapes = pickled_shapes(weights)
    num_heads = config["model_config"].get("output_dim")
    rank = config["peft_lora_config"].get("lora_r")
    heads = [name for name in shapes if name.endswith("rm_head.weight")]
    problems = [] if heads else [f"{weights} has no tensor rm_head.weight among {len(shapes)}"]
    problems += [
        f"tensor {name!r} in {weights} has shape {shapes[name]}, model_config.json says output_dim {num_heads}"
        for name in heads
        if shapes[name][0] != num_heads
    ]
    problems += [
        f"tensor {name!r} in {weights} has shape {shape}, model_config.json says lora_r {rank}"
        for name, shape in shapes.items()
        if ".lora_A." in name and shape[0] != rank
    ]
    return shortened(problems)


def clip_problems(root: Path, folder: str) -> list[str]:
    """Of a CLIP model; buffers that older files hold beside its weights do not matter."""
    from transformers import CLIPConfig, CLIPModel

    path = Folder(root / folder, "CLIP")
    read_json(path.path / "config.json", path.label)
    with torch.device("meta"):
        expected = shapes_of(CLIPModel(CLIPConfig.from_pretrained(path.path, local_files_only=True)).state_dict())
    weights = read_header(path, "model")
    own = {name: shape for name, shape in weights.shapes.items() if name in expected}
    return shortened(tensor_problems(path, expected, Weights(own, weights.files, weights.drawn)))


def pickled_shapes(path: Path) -> Shapes:
    """Names and shapes in a file of ``torch.save``, without its numbers.

    Raises:
        ValueError: The file is damaged, or holds more than tensors.
    """
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"  # the older format cannot be mapped, and is read through
    try:
        content = torch.load(path, map_location="meta", mmap=is_archive, weights_only=True)
        tensors = content.get("state_dict", content)
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    except (OSError, RuntimeError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged or no file of weights ({error})") from error


def _has_tokenizer(root: Path, *folders: str) -> bool:
    """Claims that the tokenizer, a download of its own, is there; the loaders' checks ask for it first."""
    return any((root / folder / "tokenizer_config.json").is_file() for folder in folders)


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1
