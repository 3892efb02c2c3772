"""The miniature's models: the classes of Wan2.1 in small sizes, in diffusers' layout; see
`architecture`.
"""

import json
from pathlib import Path

from torch import Tensor, nn

from examples.miniature_from_scratch.architecture import CONFIGS as ALL_CONFIGS
from examples.miniature_from_scratch.architecture import draw_encoder
from hyvideo.miniature.world import CAPTIONS
from hyvideo.models import family
from hyvideo.models.wan.family import FAMILY

CONFIGS = ALL_CONFIGS["wan"]
HAS_REWARD_MODEL = False
DRAWN_PARTS = ()
LOG_VARIANCES = "quant_conv.bias"
RESIDUAL_ENDS = ("conv2.", ".proj.")


def build_tokenizer():
    """Return a T5 tokenizer with a token for each word of the captions and for each ASCII
    character.
    """
    from transformers import T5TokenizerFast

    words = sorted({"▁" + word for text in CAPTIONS for word in text.split()})
    letters = ["▁", *map(chr, range(33, 127))]
    special = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    scored = [(word, -1.0) for word in words] + [(letter, -9.0) for letter in letters]
    return T5TokenizerFast(vocab=special + scored, extra_ids=0)


def save_text_encoder(out: Path, seed: int) -> None:
    """Write tokenizer, a random frozen UMT5 encoder in float16, scheduler and the model index of a
    WanPipeline.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = build_tokenizer()
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **CONFIGS["text_encoder"]))
    draw_encoder(encoder, "shared", seed).save_pretrained(out / "text_encoder")
    tokenizer.save_pretrained(out / "tokenizer")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(out / "scheduler")
    (out / "model_index.json").write_text(json.dumps(CONFIGS["pipeline"], indent=2) + "\n")


def new_model(part: str) -> nn.Module:
    """Return the untrained ``transformer`` or ``vae`` of models.yaml."""
    return family.new_model(getattr(FAMILY, part), CONFIGS[part])


def save_vae(vae: nn.Module, latents: Tensor, out: Path) -> None:
    """Write the VAE with the mean and the standard deviation of each channel of ``latents``."""
    mean, std = (statistic((0, 2, 3, 4)).tolist() for statistic in (latents.mean, latents.std))
    vae.register_to_config(latents_mean=mean, latents_std=std)
    vae.half().save_pretrained(out / "vae")


def save_transformer(transformer: nn.Module, out: Path, seed: int) -> None:
    """Write the transformer in float16."""
    transformer.half().save_pretrained(out / "transformer")
