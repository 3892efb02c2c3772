"""The miniature's models: the classes of HunyuanVideo-1.5 in small sizes (`wan`: of Wan2.1), and a
small tokenizer.
"""

import json
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn

from hyvideo.data.randomness import normal
from hyvideo.miniature.world import CAPTIONS
from hyvideo.models import family
from hyvideo.models.hunyuan_video15.family import FAMILY
from hyvideo.models.hunyuan_video15.prompt_encoders import system_message
from hyvideo.models.hunyuan_video15.tiny import write_glyph_encoder
from hyvideo.models.saving import save_original

VERSION = "miniature"
CONFIGS = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
HAS_REWARD_MODEL = True
# Only used with quoted text or a reference image, so not saved but drawn again on loading. Names of
# the original.
DRAWN_PARTS = ("byt5_in.", "vision_in.")
# VAE parameter whose second half is the log variances' bias
LOG_VARIANCES = "encoder.conv_out.conv.bias"
# parts of the names of the last layers of the VAE's residual branches
RESIDUAL_ENDS = ("conv2.conv", "proj_out")


def build_tokenizer():
    """Return a Qwen2 tokenizer with byte-level BPE trained on the captions and the pipeline's
    system message.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    # A caption starts the user's turn, so its first word has no leading space, unlike the other
    # words.
    bpe.train_from_iterator(
        CAPTIONS * 8 + [system_message(), "system\n", "user\n", "assistant\n"] * 4, trainer
    )
    model = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=dict(model["vocab"]),
        merges=[tuple(pair) for pair in model["merges"]],
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CONFIGS["chat_template"],
    )


def save_text_encoder(out: Path, seed: int) -> None:
    """Write the tokenizer and a random, frozen Qwen2.5-VL text model in float16, and the same of
    ByT5, which reads quoted text.
    """
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    folder = out / "text_encoder" / "llm"
    tokenizer = build_tokenizer()
    encoder = Qwen2_5_VLTextModel(
        Qwen2_5_VLTextConfig(vocab_size=len(tokenizer), **CONFIGS["text_encoder"])
    )
    draw_encoder(encoder, "embed_tokens", seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_glyph_encoder(out / "text_encoder", CONFIGS["glyph_encoder"], seed, dtype=torch.float16)


def draw_encoder(encoder: nn.Module, embeddings: str, seed: int) -> nn.Module:
    """Draw the weights of a text encoder and return it in float16; ``embeddings`` is part of the
    embeddings' name.
    """
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            if weight.ndim > 1:
                scale = 1.0 if embeddings in name else 0.08
                weight.copy_(scale * normal(tuple(weight.shape), seed, "text encoder", name))
    return encoder.half()


def new_model(part: str) -> nn.Module:
    """Return the untrained ``transformer`` or ``vae`` of models.yaml."""
    component = getattr(FAMILY, part)
    return family.new_model(component, component.config_to_diffusers(CONFIGS[part]))


def save_vae(vae: nn.Module, latents: Tensor, out: Path) -> None:
    """Write the VAE with the scaling factor that gives ``latents`` unit variance."""
    vae.register_to_config(scaling_factor=1 / latents.std().item())
    save_original(vae, out / "vae")


def save_transformer(transformer: nn.Module, out: Path, seed: int) -> None:
    """Write the transformer without the parts that loading draws from ``seed``."""
    drawn = {part: seed for part in DRAWN_PARTS}
    save_original(transformer, out / "transformer" / VERSION, drawn=drawn)
