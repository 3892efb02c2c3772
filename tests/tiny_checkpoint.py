"""A small complete checkpoint of the real classes with the layout of a download: 37 MB, 30 MB of them a transformer.

All weights are random; no layer keeps a zero initialization. The language model is the miniature's. It is written
in the original layout. diffusers' pipeline with the same weights, built without this project's loaders, is their
reference.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from hyvideo.models.hunyuan_video15 import upsamplers
from hyvideo.models.hunyuan_video15.names import transformer_to_diffusers, vae_to_diffusers
from hyvideo.models.hunyuan_video15.settings import transformer_config_to_diffusers, vae_config_to_diffusers
from hyvideo.models.loading import load_transformer, load_vae
from hyvideo.models.saving import save_original
from hyvideo.models.versions import version_defaults
from hyvideo.models.weight_files import draw_tensor

ROOT = Path(__file__).resolve().parents[1]

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
    "1080p_sr_distilled": {"z_channels": 4, "out_channels": 4, "block_out_channels": [8, 16], "num_res_blocks": 0},
}
GLYPHS = {
    "vocab_size": 384,
    "d_model": 1472,
    "d_kv": 16,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
}
# Special tokens after the tokenizer's 384 tokens in the embedding: first the colors, then the fonts.
COLORS = {"white": 0, "black": 1}
FONTS = {"en-A": 0, "en-B": 1, "cn-C": 2, "jp-D": 3}
GLYPH_PREFIX = "module.text_tower.encoder."
VISION = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PREPROCESSOR = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "SiglipImageProcessor",
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"height": 28, "width": 28},
}


def write_original(root: Path, versions: tuple[str, ...] = ("480p_t2v",), *, seed: int = 0) -> Path:
    """Write all parts. ``versions`` are released names, which determine the tasks; all have the same weights."""
    for version in versions:
        _write_transformer(root, version, seed)
    _write_config(root / "vae", VAE)
    save_original(load_vae(root, random_weights_seed=seed), root / "vae", dtype=torch.float32)
    shutil.copytree(ROOT / "assets" / "miniature" / "text_encoder" / "llm", root / "text_encoder" / "llm")
    _write_glyphs(root / "text_encoder", seed)
    _write_vision(root / "vision_encoder" / "siglip", seed)
    (root / "scheduler").mkdir()
    (root / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "FlowMatchDiscreteScheduler"}')
    return root


def write_super_resolution(root: Path, name: str = "720p_sr_distilled", *, seed: int = 1) -> Path:
    """Add a super-resolution model with random weights, its transformer and its upsampler, to a folder."""
    channels = TRANSFORMER["out_channels"]
    config = {"in_channels": 3 * channels + 2, "concat_condition": False, "use_meanflow": True, "ideal_task": None}
    folder = root / "transformer" / name
    _write_config(folder, TRANSFORMER | config | {"ideal_resolution": name.split("_")[0]})
    save_original(load_transformer(root, name, random_weights_seed=seed), folder, dtype=torch.float32)
    folder = root / "upsampler" / name
    _write_config(folder, UPSAMPLERS[name])
    model = upsamplers.build(**upsamplers.arguments_of(UPSAMPLERS[name]))
    state = upsamplers.COMPONENT.to_original(model.state_dict())
    weights = {key: draw_tensor(seed, key, tuple(tensor.shape)) for key, tensor in state.items()}
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    return root


def diffusers_pipeline(root: Path, version: str):
    """Return diffusers' float32 pipeline for the version's task, from a folder written by `write_original`.

    The files are read without this project's loaders; only the tables of names and settings are shared.
    """
    import diffusers
    from transformers import AutoImageProcessor, Qwen2_5_VLTextModel, Qwen2Tokenizer, SiglipVisionModel

    transformer = _converted(
        diffusers.HunyuanVideo15Transformer3DModel,
        root / "transformer" / version,
        transformer_config_to_diffusers,
        transformer_to_diffusers,
    )
    vae = _converted(diffusers.AutoencoderKLHunyuanVideo15, root / "vae", vae_config_to_diffusers, vae_to_diffusers)
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
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=version_defaults(version).shift),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    }
    pipeline_class = diffusers.HunyuanVideo15Pipeline
    if transformer.config.task_type == "i2v":
        siglip = root / "vision_encoder" / "siglip"
        parts["image_encoder"] = SiglipVisionModel.from_pretrained(siglip / "image_encoder", dtype=torch.float32)
        # The default backend needs torchvision.
        parts["feature_extractor"] = AutoImageProcessor.from_pretrained(siglip / "feature_extractor", backend="pil")
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


def _write_transformer(root: Path, version: str, seed: int) -> None:
    resolution, task = version.split("_")[:2]
    config = TRANSFORMER | {"ideal_resolution": resolution, "ideal_task": task, "use_meanflow": "step" in version}
    folder = root / "transformer" / version
    _write_config(folder, config)
    transformer = load_transformer(root, version, random_weights_seed=seed)
    save_original(transformer, folder, dtype=torch.float32)


def _write_glyphs(folder: Path, seed: int) -> None:
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    num_tokens = GLYPHS["vocab_size"] + len(COLORS) + len(FONTS)
    T5Config(**GLYPHS).save_pretrained(folder / "byt5-small")
    ByT5Tokenizer().save_pretrained(folder / "byt5-small")
    encoder = _drawn(T5EncoderModel(T5Config(**GLYPHS | {"vocab_size": num_tokens})), seed).encoder
    state = {GLYPH_PREFIX + name: tensor for name, tensor in encoder.state_dict().items()}
    for part in ("assets", "checkpoints"):
        (folder / "Glyph-SDXL-v2" / part).mkdir(parents=True)
    (folder / "Glyph-SDXL-v2" / "assets" / "color_idx.json").write_text(json.dumps(COLORS))
    (folder / "Glyph-SDXL-v2" / "assets" / "multilingual_10-lang_idx.json").write_text(json.dumps(FONTS))
    torch.save({"state_dict": state}, folder / "Glyph-SDXL-v2" / "checkpoints" / "byt5_model.pt")


def _read_glyphs(folder: Path):
    """Return ByT5's tokenizer with the special tokens, and its encoder with an embedding row for each of them."""
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    colors, fonts = (
        json.loads((folder / "Glyph-SDXL-v2" / "assets" / name).read_text())
        for name in ("color_idx.json", "multilingual_10-lang_idx.json")
    )
    tokenizer = ByT5Tokenizer.from_pretrained(folder / "byt5-small")
    tokenizer.add_tokens([f"<color-{i}>" for i in range(len(colors))], special_tokens=True)
    tokenizer.add_tokens([f"<{code[:2]}-font-{i}>" for code, i in fonts.items()], special_tokens=True)
    config = T5Config.from_pretrained(folder / "byt5-small", vocab_size=len(tokenizer))
    encoder = T5EncoderModel(config).eval()
    content = torch.load(folder / "Glyph-SDXL-v2" / "checkpoints" / "byt5_model.pt", weights_only=True)
    encoder.encoder.load_state_dict({name.removeprefix(GLYPH_PREFIX): t for name, t in content["state_dict"].items()})
    return tokenizer, encoder


def _converted(model_class: type, folder: Path, config_to_diffusers, to_diffusers):
    model = model_class(**config_to_diffusers(json.loads((folder / "config.json").read_text())))
    model.load_state_dict(to_diffusers(load_file(folder / "diffusion_pytorch_model.safetensors")))
    return model.eval()


def _write_vision(folder: Path, seed: int) -> None:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    _drawn(SiglipVisionModel(SiglipVisionConfig(**VISION)), seed).save_pretrained(folder / "image_encoder")
    (folder / "feature_extractor").mkdir()
    (folder / "feature_extractor" / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def _drawn(model, seed: int):
    state = {name: draw_tensor(seed, name, tuple(t.shape)) for name, t in model.state_dict().items()}
    model.load_state_dict(state)
    return model


def _write_config(folder: Path, config: dict) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
