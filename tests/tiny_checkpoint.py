"""A small complete checkpoint of the real classes with the layout of a download: 37 MB, 30 MB of
them a transformer.

All weights are random; no layer keeps a zero initialization. The language model is the miniature's.
It is written in the original layout. diffusers' pipeline with the same weights, built without this
project's loaders, is their reference.
"""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from hyvideo.models.hunyuan_video15 import tiny
from hyvideo.models.hunyuan_video15.names import transformer_to_diffusers, vae_to_diffusers
from hyvideo.models.hunyuan_video15.settings import (
    transformer_config_to_diffusers,
    vae_config_to_diffusers,
)
from hyvideo.models.versions import version_defaults
from tests import super_resolution_files

TRANSFORMER = {
    "patch_size": [1, 1, 1],
    "in_channels": 4,
    "concat_condition": True,
    "out_channels": 4,
    "hidden_size": 32,
    "heads_num": 2,
    "mlp_width_ratio": 4,
    "mm_double_blocks_depth": 2,
    "rope_dim_list": [4, 6, 6],
    "rope_theta": 256,
    "text_states_dim": 64,
    "vision_states_dim": 24,
    "use_meanflow": False,
}
VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": [8, 8, 8, 8, 8],
    "layers_per_block": 1,
    "ffactor_spatial": 16,
    "ffactor_temporal": 4,
    "sample_size": 256,
    "sample_tsize": 64,
    "scaling_factor": 1.03682,
    "shift_factor": None,
    "downsample_match_channel": True,
    "upsample_match_channel": True,
}
UPSAMPLERS = {
    "720p_sr_distilled": {
        "in_channels": 4,
        "out_channels": 4,
        "hidden_channels": 8,
        "num_blocks": 1,
        "global_residual": True,
    },
    "1080p_sr_distilled": {
        "z_channels": 4,
        "out_channels": 4,
        "block_out_channels": [8, 16],
        "num_res_blocks": 0,
    },
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def settings() -> tiny.TinySettings:
    """Return the settings of all models; tests may change the dictionaries of this file."""
    return tiny.TinySettings(transformer=TRANSFORMER, vae=VAE, vision=VISION)


def write_original(root: Path, versions: tuple[str, ...] = ("480p_t2v",), *, seed: int = 0) -> Path:
    """Write all parts.

    ``versions`` are released names, which determine the tasks; all have the same weights.
    """
    tiny.write_checkpoint(root, versions, settings(), seed=seed)
    return root


def write_super_resolution(root: Path, name: str = "720p_sr_distilled", *, seed: int = 1) -> Path:
    """Add a super-resolution model with random weights, its transformer and its upsampler, to a
    folder.
    """
    super_resolution_files.write_super_resolution(
        root, name, TRANSFORMER, UPSAMPLERS[name], seed=seed
    )
    return root


def diffusers_pipeline(root: Path, version: str):
    """Return diffusers' float32 pipeline for the version's task, from a folder written by
    `write_original`.

    The files are read without this project's loaders; only the tables of names and settings are
    shared.
    """
    import diffusers
    from transformers import (
        AutoImageProcessor,
        Qwen2_5_VLTextModel,
        Qwen2Tokenizer,
        SiglipVisionModel,
    )

    transformer = _converted(
        diffusers.HunyuanVideo15Transformer3DModel,
        root / "transformer" / version,
        transformer_config_to_diffusers,
        transformer_to_diffusers,
    )
    vae = _converted(
        diffusers.AutoencoderKLHunyuanVideo15,
        root / "vae",
        vae_config_to_diffusers,
        vae_to_diffusers,
    )
    vae.enable_slicing()  # diffusers' VAE does not support batches
    llm = root / "text_encoder" / "llm"
    tokenizer_2, text_encoder_2 = _read_glyphs(root / "text_encoder")
    parts = {
        "transformer": transformer,
        "vae": vae,
        "text_encoder": Qwen2_5_VLTextModel.from_pretrained(llm, dtype=torch.float32),
        "tokenizer": Qwen2Tokenizer.from_pretrained(llm),
        "text_encoder_2": text_encoder_2,
        "tokenizer_2": tokenizer_2,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(
            shift=version_defaults(version).shift
        ),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    }
    pipeline_class = diffusers.HunyuanVideo15Pipeline
    if transformer.config.task_type == "i2v":
        siglip = root / "vision_encoder" / "siglip"
        parts["image_encoder"] = SiglipVisionModel.from_pretrained(
            siglip / "image_encoder", dtype=torch.float32
        )
        # The default backend needs torchvision.
        parts["feature_extractor"] = AutoImageProcessor.from_pretrained(
            siglip / "feature_extractor", backend="pil"
        )
        pipeline_class = diffusers.HunyuanVideo15ImageToVideoPipeline
    pipeline = pipeline_class(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def write_diffusers(root: Path, version: str, out: Path) -> Path:
    """Write the version and the other parts of ``root`` as the folder of a diffusers pipeline."""
    diffusers_pipeline(root, version).save_pretrained(out)
    return out


def write_image(path: Path, height: int = 90, width: int = 160) -> str:
    """Write a colorful image without symmetry and return its path."""
    y, x = np.mgrid[0:height, 0:width] / 32
    pixels = np.stack([np.sin(x * y), np.cos(x + y**2), np.sin(y - x / 2)], -1)
    Image.fromarray(((pixels + 1) * 127.5).astype(np.uint8)).save(path)
    return str(path)


def _read_glyphs(folder: Path):
    """Return ByT5's tokenizer with the special tokens, and its encoder with an embedding row for
    each of them.
    """
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    colors, fonts = (
        json.loads((folder / "Glyph-SDXL-v2" / "assets" / name).read_text())
        for name in ("color_idx.json", "multilingual_10-lang_idx.json")
    )
    tokenizer = ByT5Tokenizer.from_pretrained(folder / "byt5-small")
    tokenizer.add_tokens([f"<color-{i}>" for i in range(len(colors))], special_tokens=True)
    tokenizer.add_tokens(
        [f"<{code[:2]}-font-{i}>" for code, i in fonts.items()], special_tokens=True
    )
    config = T5Config.from_pretrained(folder / "byt5-small", vocab_size=len(tokenizer))
    encoder = T5EncoderModel(config).eval()
    content = torch.load(
        folder / "Glyph-SDXL-v2" / "checkpoints" / "byt5_model.pt", weights_only=True
    )
    encoder.encoder.load_state_dict(
        {name.removeprefix(tiny.GLYPH_PREFIX): t for name, t in content["state_dict"].items()}
    )
    return tokenizer, encoder


def _converted(model_class: type, folder: Path, config_to_diffusers, to_diffusers):
    model = model_class(**config_to_diffusers(json.loads((folder / "config.json").read_text())))
    model.load_state_dict(to_diffusers(load_file(folder / "diffusion_pytorch_model.safetensors")))
    return model.eval()
