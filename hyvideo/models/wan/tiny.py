"""Checkpoints of random weights in diffusers' layout, for rehearsals and tests: true structure,
minimal width.

The default settings keep what determines the shapes of a run's data: latent channels and their
scale, compression, patches and text slots. Widths, heads and layers are minimal.
"""

import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyvideo.models.versions import version_defaults
from hyvideo.models.wan.settings import ANYFLOW
from hyvideo.weights.weight_files import draw_tensor

TEXT_WIDTH = 32  # released: 4096
_T5_HEAD = 8  # width of an attention head of the text encoder
_SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")


def transformer_settings(num_heads: int = 2) -> dict[str, Any]:
    """Return the settings of a transformer with heads of 16 channels.

    Released, 1.3B: 30 blocks, 12 heads of 128.
    """
    return {
        "num_attention_heads": num_heads,
        "attention_head_dim": 16,
        "ffn_dim": 64,
        "num_layers": 2,
    }


def vae_settings(version: str) -> dict[str, Any]:
    """Return the settings of a VAE with the released compression, latent channels and scale, and
    four base channels.
    """
    import diffusers

    settings = {"base_dim": 4, "dim_mult": [1, 2, 4, 4]}
    if not version.startswith("wan2.2_ti2v_5b"):
        return settings
    released = inspect.signature(diffusers.AutoencoderKLWan).parameters
    # 48 channels instead of 16
    three = {name: released[name].default * 3 for name in ("latents_mean", "latents_std")}
    residual = {
        "z_dim": 48,
        "decoder_base_dim": 4,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
    }
    return settings | residual | three


_CLIP_TOKENS = 257  # as of the released model
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 224,
    "patch_size": 14,
}


def write(root: Path, version: str, *, num_heads: int, prompts: Iterable[str]) -> None:
    """Write a tiny checkpoint of a version.

    Each word of ``prompts`` becomes one token of the text encoder.
    """
    words, characters = _vocabulary(prompts, version)
    known = version_defaults(version)
    write_checkpoint(
        root,
        transformer_settings(num_heads),
        vae_settings(version),
        words,
        characters,
        seed=0,
        is_anyflow=known.is_flow_map,
        boundary=known.boundary,
        reads_given_video=known.task == "i2v",
        reads_features=known.task == "i2v" and version.startswith("wan2.1"),
        reads_last_frame="flf2v" in version,
    )


def tokenizer_of(prompts: Iterable[str], version: str):
    """Return a tokenizer with one token for each word of ``prompts`` and of the version's negative
    prompt.
    """
    return _tokenizer(*_vocabulary(prompts, version))


def _vocabulary(prompts: Iterable[str], version: str) -> tuple[list[str], str]:
    """Return the words, which begin with "▁", and the characters of prompts and the version's
    negative prompt.
    """
    texts = [*prompts, version_defaults(version).negative_prompt]
    words = sorted({"▁" + word for text in texts for word in text.split()})
    return words, "".join(sorted({"▁"}.union(*texts)))


def write_checkpoint(
    root: Path,
    transformer: Mapping[str, Any],
    vae: Mapping[str, Any],
    words: Iterable[str],
    characters: str,
    *,
    seed: int,
    is_anyflow: bool = False,
    boundary: float | None = None,
    reads_given_video: bool = False,
    reads_features: bool = False,
    reads_last_frame: bool = False,
) -> None:
    """Write transformer, VAE, UMT5, tokenizer, scheduler and model_index.json with random weights
    in float32.

    The tokenizer has a token for each of ``words``, which begin with "▁", and for each character.
    ``is_anyflow`` writes the transformer, scheduler and index of AnyFlow, ``boundary`` two experts,
    ``reads_given_video`` the pipeline of image-to-video, ``reads_features`` also CLIP, and
    ``reads_last_frame`` positions of the features of two pictures.
    """
    import diffusers
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = _tokenizer(words, characters)
    vae_model = diffusers.AutoencoderKLWan(**vae)
    channels = vae_model.config.z_dim
    class_name = ANYFLOW if is_anyflow else "WanTransformer3DModel"
    in_channels = 2 * channels + 4 if reads_given_video else channels
    settings = dict(transformer) | {
        "text_dim": TEXT_WIDTH,
        "freq_dim": 32,
        "in_channels": in_channels,
        "out_channels": channels,
    }
    if reads_features:
        width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
        settings |= {"image_dim": _CLIP["hidden_size"], "added_kv_proj_dim": width}
    if reads_last_frame:
        settings["pos_embed_seq_len"] = 2 * _CLIP_TOKENS
    model = getattr(diffusers, class_name)(**settings)
    umt5 = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=_T5_HEAD,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    if is_anyflow:
        scheduler = diffusers.FlowMapEulerDiscreteScheduler(shift=5.0)
    else:
        scheduler = diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            num_train_timesteps=1000,
            flow_shift=3.0,
        )
    drawn(model, seed).save_pretrained(root / "transformer")
    if boundary is not None:  # other weights, so that a swap shows
        drawn(model, seed + 3).save_pretrained(root / "transformer_2")
    drawn(vae_model, seed + 1).save_pretrained(root / "vae")
    drawn(UMT5EncoderModel(umt5), seed + 2).save_pretrained(root / "text_encoder")
    tokenizer.save_pretrained(root / "tokenizer")
    scheduler.save_pretrained(root / "scheduler")
    pipeline = "AnyFlowPipeline" if is_anyflow else "WanPipeline"
    if reads_given_video:
        pipeline = "WanImageToVideoPipeline"
    index = {
        "_class_name": pipeline,
        "_diffusers_version": diffusers.__version__,
        "transformer": ["diffusers", class_name],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "scheduler": ["diffusers", type(scheduler).__name__],
    }
    if boundary is not None:
        index |= {"transformer_2": index["transformer"], "boundary_ratio": boundary}
    if reads_features:
        _write_clip(root, seed + 4)
        index |= {
            "image_encoder": ["transformers", "CLIPVisionModel"],
            "image_processor": ["transformers", "CLIPImageProcessor"],
        }
    elif reads_given_video:
        index |= {"image_encoder": [None, None], "image_processor": [None, None]}
    (root / "model_index.json").write_text(json.dumps(index, indent=2))


def _write_clip(root: Path, seed: int) -> None:
    """Write CLIP's vision model with random weights, and its image processor."""
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    drawn(CLIPVisionModel(CLIPVisionConfig(**_CLIP)), seed).save_pretrained(root / "image_encoder")
    CLIPImageProcessorPil().save_pretrained(root / "image_processor")


def _tokenizer(words: Iterable[str], characters: str):
    """Return a tokenizer of UMT5's class, without normalization."""
    from transformers import T5Tokenizer

    special = [(token, 0.0) for token in _SPECIAL_TOKENS]
    pieces = [(word, -1.0) for word in words] + [(character, -5.0) for character in characters]
    return T5Tokenizer(vocab=special + pieces, extra_ids=0, model_max_length=512)


def drawn(model: nn.Module, seed: int) -> nn.Module:
    """Fill a model with random weights: matrices keep the scale of their inputs, gains are near 1,
    biases near 0.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and not name.endswith(".gamma"):
                weight.copy_(draw_tensor(seed, name, tuple(weight.shape)))
                # T5 does not scale its attention scores
                if name.endswith("SelfAttention.q.weight"):
                    weight.mul_(_T5_HEAD**-0.5)
            else:
                mean = 0.0 if name.endswith("bias") else 1.0
                weight.copy_(
                    mean
                    + 0.1 * draw_tensor(seed, name + ".drawn", (weight.numel(), 1)).view_as(weight)
                )
    return model.eval()
