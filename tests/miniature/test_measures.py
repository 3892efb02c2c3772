"""Tests of the true scores: clean videos score high, and each defect lowers the corresponding
score.
"""

import pytest
import torch

from hyvideo.data.randomness import generator, normal
from hyvideo.miniature.measures import frechet_distance, measure, moments
from hyvideo.miniature.world import LABELS, render

VISUAL_QUALITY, MOTION_QUALITY, TEXT_ALIGNMENT = range(3)
COLOR, SHAPE, DIRECTION = range(3)


def to_clips(videos):
    """Convert values in [-1, 1] to uint8, with frames before channels."""
    return ((videos + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).transpose(1, 2)


@pytest.fixture(scope="module")
def videos():
    return render(LABELS, generator(0, "test measures"))


@pytest.fixture(scope="module")
def clips(videos):
    return to_clips(videos)


@pytest.fixture(scope="module")
def clean(clips):
    return measure(clips, LABELS)


# --- scores ------------------------------------------------------------------------------------


def test_clean_videos_score_as_documented(clean):
    assert clean.scores.mean(0).tolist() == pytest.approx([0.81, 0.99, 0.98], abs=0.01)
    assert clean.all_correct.mean() == 1


@pytest.mark.parametrize("column", [COLOR, SHAPE])
def test_a_wrong_attribute_lowers_alignment_by_a_third(clips, clean, column):
    wrong_labels = LABELS.clone()
    wrong_labels[:, column] = (wrong_labels[:, column] + 1) % (wrong_labels[:, column].max() + 1)
    result = measure(clips, wrong_labels)
    assert result.correct[:, column].sum() == 0 and result.all_correct.sum() == 0
    for other in {COLOR, SHAPE, DIRECTION} - {column}:
        assert result.correct[:, other].mean() == 1
    assert (
        clean.scores[:, TEXT_ALIGNMENT] - result.scores[:, TEXT_ALIGNMENT]
    ).mean().item() == pytest.approx(1 / 3, abs=0.03)
    assert torch.equal(result.scores[:, VISUAL_QUALITY], clean.scores[:, VISUAL_QUALITY])
    assert torch.equal(result.scores[:, MOTION_QUALITY], clean.scores[:, MOTION_QUALITY])


def test_a_reversed_video_moves_in_the_opposite_direction(clips):
    opposite = LABELS.clone()
    opposite[:, 2] = torch.tensor([1, 0, 3, 2])[LABELS[:, 2]]
    assert measure(clips.flip(1), opposite).correct[:, DIRECTION].mean() == 1
    assert measure(clips.flip(1), LABELS).correct[:, DIRECTION].sum() == 0


def test_an_empty_video_scores_zero():
    result = measure(torch.full((4, 9, 3, 32, 32), 0, dtype=torch.uint8), LABELS[::12])
    assert result.scores.max() < 0.05
    assert result.all_correct.sum() == 0


def test_noise_lowers_visual_quality(videos, clean):
    noisy = videos + 0.2 * normal(videos.shape, 0, "test noise")
    assert (
        measure(to_clips(noisy), LABELS).scores[:, VISUAL_QUALITY]
        < clean.scores[:, VISUAL_QUALITY] - 0.1
    ).all()


def test_a_jumping_path_lowers_only_motion_quality(clips, clean):
    jumping = clips.clone()
    jumping[:, 1::2] = jumping[:, 1::2].roll((2, 2), dims=(3, 4))
    result = measure(jumping, LABELS)
    assert (result.scores[:, MOTION_QUALITY] < clean.scores[:, MOTION_QUALITY] - 0.1).all()
    assert (result.scores[:, VISUAL_QUALITY] - clean.scores[:, VISUAL_QUALITY]).abs().mean() < 0.05


def test_scores_lie_in_the_unit_interval_for_any_pixels(clips, clean):
    random = torch.from_numpy(
        generator(0, "test pixels").integers(0, 256, size=clips.shape, dtype="uint8")
    )
    for result in (measure(random, LABELS), clean):
        for values in (result.scores, result.correct):
            assert values.shape == (48, 3)
            assert values.min() >= 0 and values.max() <= 1


def test_each_video_is_scored_independently(clips, clean):
    for i in (0, 17, 47):
        alone = measure(clips[i : i + 1], LABELS[i : i + 1])
        torch.testing.assert_close(alone.scores[0], clean.scores[i])


# --- held-out distance -------------------------------------------------------------------------


def test_moments_match_the_sample_statistics():
    samples = torch.tensor([[0.0, 1.0], [2.0, 5.0], [4.0, 3.0]], dtype=torch.float64)
    mean, covariance = moments(samples)
    assert mean.tolist() == [2, 3]
    assert covariance.tolist() == [[4, 2], [2, 4]]


def test_frechet_distance_of_diagonal_gaussians_is_the_sum_over_dimensions():
    """Per dimension (m_a - m_b)^2 + (s_a - s_b)^2."""
    a = torch.tensor([1.0, -2.0]).double(), torch.diag(torch.tensor([1.0, 9.0])).double()
    b = torch.tensor([4.0, 0.0]).double(), torch.diag(torch.tensor([4.0, 1.0])).double()
    assert frechet_distance(a, b) == pytest.approx((9 + 1) + (4 + 4))


def test_frechet_distance_agrees_with_the_matrix_square_root():
    """With the symmetric root: tr((C_a C_b)^(1/2)) = tr((C_a^(1/2) C_b C_a^(1/2))^(1/2))."""
    a, b = (
        moments(normal((50, 5), 0, name).double() * scale)
        for name, scale in (("a", 1.0), ("b", 2.0))
    )
    values, vectors = torch.linalg.eigh(a[1])
    root = vectors @ values.sqrt().diag() @ vectors.T
    root_trace = torch.linalg.eigvalsh(root @ b[1] @ root).sqrt().sum()
    expected = (a[0] - b[0]).square().sum() + a[1].trace() + b[1].trace() - 2 * root_trace
    assert frechet_distance(a, b) == pytest.approx(expected.item())
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a))
