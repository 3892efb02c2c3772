"""Reward models with random weights for rehearsals and tests: true preprocessing and prompt,
minimal width.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from hyvideo.files.files import ROOT
from hyvideo.rewards.hpsv3.scorer import REWARD_TOKEN
from hyvideo.rewards.qwen2_vl.inputs import load_tokenizer
from hyvideo.rewards.videoalign.checkpoint import save_weights
from hyvideo.rewards.videoalign.prompt import REWARD_TOKENS

_MINIATURE = ROOT / "assets" / "miniature" / "VideoReward"
_WIDTH = 32


def write(scorer: str, folder: Path) -> bool:
    """Write the files of a built-in scorer; return whether it has any, because a judge and a custom
    class have none.
    """
    if scorer == "videoalign":
        _write_videoalign(folder)
    elif scorer in ("clip", "pickscore"):
        _write_clip(folder)
    elif scorer == "hpsv3":
        _write_hpsv3(folder)
    else:
        return False
    return True


def _write_videoalign(folder: Path) -> None:
    """Write a VideoReward folder with the released sampling of frames (2 per second), pixel limit
    and question.
    """
    shutil.copytree(_MINIATURE, folder)
    settings = json.loads((folder / "model_config.json").read_text())
    data = settings["data_config"]
    data["fps"] = 2.0
    data["num_frames"] = None
    data["max_frame_pixels"] = 200704
    data["prompt_template_type"] = "detailed_special"
    data.pop("min_frame_pixels")
    (folder / "model_config.json").write_text(json.dumps(settings, indent=1))

    tokenizer = load_tokenizer(folder / "checkpoint-1" / "tokenizer", REWARD_TOKENS)
    generator = torch.Generator().manual_seed(0)
    weights = _write_qwen2_vl(folder / "base", len(tokenizer), generator)
    save_weights(folder / "checkpoint-1", weights, torch.randn(1, _WIDTH, generator=generator))


def _write_hpsv3(folder: Path) -> None:
    """Write an HPSv3 folder: the released names of tensors, and the released head."""
    tokenizer = load_tokenizer(_MINIATURE / "checkpoint-1" / "tokenizer", [REWARD_TOKEN])
    tokenizer.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    state = _write_qwen2_vl(folder, len(tokenizer), generator)
    weights = {
        name.replace("language_model.", "model."): tensor.bfloat16()
        for name, tensor in state.items()
    }
    for layer, (width, height) in {0: (_WIDTH, 1024), 3: (1024, 16), 5: (16, 2)}.items():
        weights[f"rm_head.{layer}.weight"] = torch.randn(height, width, generator=generator) * 0.1
        weights[f"rm_head.{layer}.bias"] = torch.zeros(height)
    save_file(weights, folder / "HPSv3.safetensors")


def _write_qwen2_vl(
    folder: Path, vocabulary: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Write the config.json of a small Qwen2-VL with the miniature's special tokens, and return
    random weights by name.
    """
    from transformers import Qwen2VLConfig, Qwen2VLModel

    base = json.loads((_MINIATURE / "base" / "config.json").read_text())
    base["hidden_size"] = _WIDTH
    base["intermediate_size"] = 2 * _WIDTH
    base["num_hidden_layers"] = 1
    base["num_attention_heads"] = 1
    base["num_key_value_heads"] = 1
    base["max_position_embeddings"] = 32768
    base["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 6, 6]}
    base["vocab_size"] = vocabulary
    vision = base["vision_config"]
    vision["depth"] = 1
    vision["embed_dim"] = _WIDTH
    vision["hidden_size"] = _WIDTH
    vision["num_heads"] = 1
    (folder / "config.json").write_text(json.dumps(base, indent=1))
    model = Qwen2VLModel(Qwen2VLConfig.from_dict(base))
    return {name: _drawn(tensor, generator) for name, tensor in model.state_dict().items()}


def _write_clip(folder: Path) -> None:
    """Write a CLIP with the sizes of ViT-L/14 and ViT-H/14: 224 pixels in patches of 14, and texts
    of 77 tokens.
    """
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    folder.mkdir(parents=True)
    characters = [chr(code) for code in range(33, 127)]
    tokens = [
        *characters,
        *(character + "</w>" for character in characters),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    (folder / "vocab.json").write_text(
        json.dumps({token: number for number, token in enumerate(tokens)})
    )
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    common = {
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {"image_size": 224, "patch_size": 14}
    model = CLIPModel(
        CLIPConfig(text_config=common | text, vision_config=common | vision, projection_dim=_WIDTH)
    )
    generator = torch.Generator().manual_seed(0)
    model.load_state_dict(
        {name: _drawn(tensor, generator) for name, tensor in model.state_dict().items()}
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _drawn(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random weights of the same shape; tables of integers, such as positions, stay."""
    if not tensor.is_floating_point():
        return tensor
    return torch.randn(tensor.shape, generator=generator) * 0.1
