"""The miniature world's models: the classes of HunyuanVideo-1.5 with small numbers, and a tokenizer of its own."""

import json
from pathlib import Path

import torch
import yaml

from hyvideo.data.randomness import normal
from hyvideo.miniature.world import CAPTIONS
from hyvideo.models.hunyuan_video15.prompt_encoders import system_message

VERSION = "miniature"
CONFIGS = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))


def build_tokenizer():
    """A Qwen2 tokenizer whose byte-level BPE was trained on the captions and the pipeline's own system message."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    # A caption opens the user's turn, so its first word comes without the leading space that the others have.
    bpe.train_from_iterator(CAPTIONS * 8 + [system_message(), "system\n", "user\n", "assistant\n"] * 4, trainer)
    model = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=dict(model["vocab"]),
        merges=[tuple(pair) for pair in model["merges"]],
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CONFIGS["chat_template"],
    )


def save_text_encoder(folder: Path, seed: int) -> None:
    """Writes tokenizer and a random, frozen Qwen2.5-VL text model in float16.

    The embeddings are unit normal and the layers small, so that a word stays recognisable in its hidden state.
    """
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    tokenizer = build_tokenizer()
    encoder = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(vocab_size=len(tokenizer), **CONFIGS["text_encoder"]))
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            if weight.ndim > 1:
                scale = 1.0 if "embed_tokens" in name else 0.08
                weight.copy_(scale * normal(tuple(weight.shape), seed, "text encoder", name))
    encoder.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
