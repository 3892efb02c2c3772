"""Super-resolution models with random weights in a checkpoint folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hyvideo.generation.super_resolution import build, to_original
from hyvideo.models.loading import load_transformer
from hyvideo.models.saving import save_original
from hyvideo.weights.weight_files import draw_tensor

UPSAMPLERS = {
    "720p_sr_distilled": {
        "in_channels": 32,
        "out_channels": 32,
        "hidden_channels": 8,
        "num_blocks": 1,
        "global_residual": True,
    },
    "1080p_sr_distilled": {
        "z_channels": 32,
        "out_channels": 32,
        "block_out_channels": [32, 32],
        "num_res_blocks": 0,
    },
}


def refiner_config(base: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the config.json of the transformer of a super-resolution model."""
    return dict(base) | {
        "in_channels": 3 * base["out_channels"] + 2,
        "concat_condition": False,
        "use_meanflow": True,
        "ideal_task": None,
        "ideal_resolution": name.split("_")[0],
    }


def write_super_resolution(
    root: Path,
    name: str,
    base: Mapping[str, Any],
    upsampler: Mapping[str, Any] | None = None,
    *,
    seed: int,
) -> None:
    """Add a super-resolution model, its transformer and its upsampler, to a folder; ``base`` has the
    settings of the base model's transformer.
    """
    folder = root / "transformer" / name
    write_config(folder, refiner_config(base, name))
    save_original(
        load_transformer(root, name, random_weights_seed=seed), folder, dtype=torch.float32
    )
    upsampler = upsampler or UPSAMPLERS[name]
    folder = root / "upsampler" / name
    write_config(folder, upsampler)
    weights = {}
    for name, tensor in build(upsampler).state_dict().items():
        original = to_original(name)
        weights[original] = draw_tensor(seed, original, tuple(tensor.shape))
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
