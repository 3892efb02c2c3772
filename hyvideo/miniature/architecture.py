"""The miniature world's models: the classes of HunyuanVideo-1.5 with small numbers, and a tokenizer trained in place.

Configurations are written in the original's names, so that a miniature checkpoint is read by the same code as the
released ones.
"""

import inspect
import json
from pathlib import Path

from hyvideo.miniature.world import CAPTIONS

VERSION = "miniature"

TRANSFORMER_CONFIG = {
    "patch_size": [1, 2, 2],
    "in_channels": 4,
    "concat_condition": True,
    "out_channels": 4,
    "hidden_size": 96,
    "heads_num": 3,
    "mlp_width_ratio": 4,
    "mlp_act_type": "gelu_tanh",
    "mm_double_blocks_depth": 4,
    "mm_single_blocks_depth": 0,
    "rope_dim_list": [8, 12, 12],
    "rope_theta": 256,
    "qkv_bias": True,
    "qk_norm": True,
    "qk_norm_type": "rms",
    "guidance_embed": False,
    "use_meanflow": False,
    "text_projection": "single_refiner",
    "use_attention_mask": True,
    "text_states_dim": 64,
    "text_states_dim_2": None,
    "text_pool_type": None,
    "glyph_byT5_v2": True,
    "vision_projection": "linear",
    "vision_states_dim": 16,
    "use_cond_type_embedding": True,
    "is_reshape_temporal_channels": False,
    "ideal_resolution": "480p",
    "ideal_task": "t2v",
}

VAE_CONFIG = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": [16, 32, 32],
    "layers_per_block": 0,
    "ffactor_spatial": 4,
    "ffactor_temporal": 4,
    "sample_size": 32,
    "sample_tsize": 9,
    "scaling_factor": 1.0,
    "shift_factor": None,
    "downsample_match_channel": True,
    "upsample_match_channel": True,
}

TEXT_ENCODER_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    # mrope_section adds up to half of head_dim
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
}

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer():
    """A Qwen2 tokenizer whose byte-level BPE was trained on the captions and the pipeline's own system message."""
    from diffusers import HunyuanVideo15Pipeline
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    signature = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds)
    system_message = signature.parameters["system_message"].default
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    # A caption opens the user's turn, so its first word comes without the leading space that the others have.
    bpe.train_from_iterator(CAPTIONS * 8 + [system_message, "system\n", "user\n", "assistant\n"] * 4, trainer)
    model = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=dict(model["vocab"]),
        merges=[tuple(pair) for pair in model["merges"]],
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
    )


def save_text_encoder(folder: Path, seed: int) -> None:
    """Writes tokenizer and a random, frozen Qwen2.5-VL text model in float16.

    The embeddings are unit normal and the layers small, so that a word stays recognisable in its hidden state.
    """
    import torch
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    from hyvideo.data.randomness import normal

    tokenizer = build_tokenizer()
    encoder = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(vocab_size=len(tokenizer), **TEXT_ENCODER_CONFIG))
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            if weight.ndim > 1:
                scale = 1.0 if "embed_tokens" in name else 0.08
                weight.copy_(scale * normal(tuple(weight.shape), seed, "text encoder", name))
    encoder.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
