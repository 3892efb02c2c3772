"""Reward models with random weights for rehearsals and tests: true preprocessing and prompt,
minimal width.
"""

import json
import shutil
from pathlib import Path

import torch

from hyvideo.data.files import ROOT
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
    else:
        return False
    return True


def _write_videoalign(folder: Path) -> None:
    """Write a VideoReward folder with the released sampling of frames (2 per second), pixel limit
    and question.
    """
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLModel

    shutil.copytree(_MINIATURE, folder)
    settings = json.loads((folder / "model_config.json").read_text())
    data = settings["data_config"]
    data["fps"] = 2.0
    data["num_frames"] = None
    data["max_frame_pixels"] = 200704
    data["prompt_template_type"] = "detailed_special"
    data.pop("min_frame_pixels")
    (folder / "model_config.json").write_text(json.dumps(settings, indent=1))

    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoint-1" / "tokenizer")
    tokenizer.add_special_tokens({"extra_special_tokens": list(REWARD_TOKENS)})
    base = json.loads((folder / "base" / "config.json").read_text())
    base["hidden_size"] = _WIDTH
    base["intermediate_size"] = 2 * _WIDTH
    base["num_hidden_layers"] = 1
    base["num_attention_heads"] = 1
    base["num_key_value_heads"] = 1
    base["max_position_embeddings"] = 32768
    base["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 6, 6]}
    base["vocab_size"] = len(tokenizer)
    vision = base["vision_config"]
    vision["depth"] = 1
    vision["embed_dim"] = _WIDTH
    vision["hidden_size"] = _WIDTH
    vision["num_heads"] = 1
    (folder / "base" / "config.json").write_text(json.dumps(base, indent=1))
    generator = torch.Generator().manual_seed(0)
    model = Qwen2VLModel(Qwen2VLConfig.from_dict(base))
    weights = {name: _drawn(tensor, generator) for name, tensor in model.state_dict().items()}
    save_weights(folder / "checkpoint-1", weights, torch.randn(1, _WIDTH, generator=generator))


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
