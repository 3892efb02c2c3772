import torch

from hyvideo.models import attention
from hyvideo.models.attention import QueryKeyValue, attend, equal_runs


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
