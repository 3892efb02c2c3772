import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

from hyvideo.models import attention
from hyvideo.models.attention import QueryKeyValue, attend, causal_mask, equal_runs


def test_neighbours_of_one_length_are_one_run():
    assert equal_runs([3, 3, 1, 3]) == [(slice(0, 2), 3), (slice(2, 3), 1), (slice(3, 4), 3)]
    assert equal_runs([]) == []


def test_attention_goes_over_the_valid_tokens_of_each_sample():
    joint = QueryKeyValue(*torch.randn(3, 2, 6, 2, 4))  # 2 samples, 6 tokens, 2 heads
    out = attend(joint, [6, 4])
    alone = attend(QueryKeyValue(*(tensor[1:, :4] for tensor in joint)), [4])
    torch.testing.assert_close(out[1:, :4], alone)
    assert not out[1, 4:].any()
    torch.testing.assert_close(out[:1], attend(QueryKeyValue(*(tensor[:1] for tensor in joint)), [6]))


def test_under_autocast_queries_and_keys_are_rounded_before_attention(transformer):
    attn = transformer.transformer_blocks[0].attn
    tables = transformer.rope(torch.zeros(1, 9, 3, 4, 5))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        image = attention.project_image(attn, torch.randn(1, 60, 64), tables)
        text = attention.project_text(attn, torch.randn(1, 7, 64))
    assert {tensor.dtype for tensor in (*image, *text)} == {torch.bfloat16}


# --- the VAE's mask ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cached_mask_is_the_one_that_diffusers_fills_row_by_row(dtype):
    device = torch.device("cpu")
    expected = HunyuanVideo15AttnBlock.prepare_causal_attention_mask(3, 4, dtype, device)
    mask = causal_mask(3, 4, dtype, device)
    assert mask.dtype == dtype
    assert torch.equal(mask, expected)
    assert causal_mask(3, 4, dtype, device) is mask


def test_a_mask_made_in_inference_mode_serves_a_backward_pass():
    causal_mask.cache_clear()
    with torch.inference_mode():
        mask = causal_mask(2, 3, torch.float32, torch.device("cpu"))
    assert not mask.is_inference()
