import torch

from hyvideo.models.attention import Layout, QueryKeyValue, WholeSequence, attend, equal_runs


def test_consecutive_samples_of_equal_length_form_one_run():
    assert equal_runs([3, 3, 1, 3]) == [(slice(0, 2), 3), (slice(2, 3), 1), (slice(3, 4), 3)]
    assert equal_runs([]) == []


def test_attention_covers_only_the_valid_tokens_of_each_sample():
    joint = QueryKeyValue(*torch.randn(3, 2, 6, 2, 4))  # 2 samples, 6 tokens, 2 heads
    out = attend(joint, [6, 4])
    alone = attend(QueryKeyValue(*(tensor[1:, :4] for tensor in joint)), [4])
    torch.testing.assert_close(out[1:, :4], alone)
    assert not out[1, 4:].any()
    torch.testing.assert_close(
        out[:1], attend(QueryKeyValue(*(tensor[:1] for tensor in joint)), [6])
    )


def test_attention_without_text_applies_rotary_embeddings():
    image = QueryKeyValue(*torch.randn(3, 2, 6, 2, 4))
    angle = torch.randn(6, 2).repeat_interleave(2, dim=1)
    cos, sin = angle.cos(), angle.sin() * torch.tensor([-1, 1, -1, 1])
    attended, none = WholeSequence().attend(image, None, Layout(cos, sin, (0, 0), 6))
    pairs = [torch.view_as_complex(tensor.unflatten(3, (2, 2))) for tensor in image[:2]]
    rotated = [
        torch.view_as_real(pair * torch.exp(1j * angle[:, None, ::2])).flatten(3) for pair in pairs
    ]
    torch.testing.assert_close(attended, attend(QueryKeyValue(*rotated, image.value), [6, 6]))
    assert none.shape == (2, 0, 2, 4)
