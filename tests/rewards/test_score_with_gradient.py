"""Scores with a gradient: the numbers of `score`, and gradients against finite differences."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyvideo.data.videos import to_levels, to_uint8
from hyvideo.miniature.reward import LearnedMiniatureScorer, MiniatureScorer
from hyvideo.miniature.world import CAPTIONS, FPS, LABELS, render
from hyvideo.rewards import contract
from hyvideo.rewards.clip_metrics import ClipScorer, PickScorer
from hyvideo.rewards.hpsv3 import HPSv3Scorer
from hyvideo.rewards.qwen2_vl.preprocessing import frame_indices, resize
from hyvideo.rewards.rewards import Scorer
from hyvideo.rewards.videoalign import VideoAlignScorer
from tests.conftest import ROOT
from tests.rewards.test_clip_metrics import write_clip

GOLDEN = ROOT / "tests" / "golden" / "videoalign"
HPSV3 = ROOT / "tests" / "golden" / "hpsv3"
MINIATURE = ROOT / "assets" / "miniature"


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip") / "tiny"
    write_clip(folder)
    return folder


def miniature_videos() -> torch.Tensor:
    """Return noisy videos of the miniature in [-1, 1]. Shape: (videos, frames, 3, 32, 32)."""
    torch.manual_seed(0)
    clean = render(LABELS[:2], np.random.default_rng(0)).transpose(1, 2)
    return (clean + 0.1 * torch.randn(clean.shape)).clamp(-1.2, 1.2)


@pytest.fixture(
    params=["miniature", "miniature_videoalign", "videoalign", "clip", "pickscore", "hpsv3"]
)
def scorer(request, clip_folder):
    makers = {
        "miniature": lambda: MiniatureScorer(MINIATURE),
        "miniature_videoalign": lambda: LearnedMiniatureScorer(MINIATURE),
        "videoalign": lambda: VideoAlignScorer(
            GOLDEN / "VideoReward", base=GOLDEN / "base", precision="fp32_math"
        ),
        "clip": lambda: ClipScorer(clip_folder),
        "pickscore": lambda: PickScorer(clip_folder),
        "hpsv3": lambda: HPSv3Scorer(
            HPSV3, base=HPSV3 / "base", precision="fp32_math", num_frames=2
        ),
    }
    return makers[request.param]()


def test_values_are_those_of_score(scorer):
    videos = miniature_videos()
    levels = to_levels(videos).requires_grad_()
    assert torch.equal(levels.to(torch.uint8), to_uint8(videos))
    found = contract.score_with_gradient(scorer, levels, CAPTIONS[:2], fps=FPS)
    expected = scorer.score([*to_uint8(videos)], CAPTIONS[:2], fps=FPS)
    rows = torch.tensor(
        [[row[name] for name in contract.declared_dimensions(scorer)] for row in expected]
    )
    torch.testing.assert_close(found.detach().float(), rows, rtol=0, atol=1e-6)
    gradient = torch.autograd.grad(found.sum(), levels)[0]
    assert gradient.isfinite().all() and gradient.abs().amax((1, 2, 3, 4)).min() > 0


def derivatives_along_gradient(function, values, step):
    """Return the derivative along the gradient, by autograd and by a central difference of ``step``
    levels at most.
    """
    leaf = values.clone().requires_grad_()
    gradient = torch.autograd.grad(function(leaf), leaf)[0]
    direction = gradient / gradient.abs().max()
    with torch.no_grad():
        difference = function(values + step * direction) - function(values - step * direction)
    return (gradient * direction).sum().item(), (difference / (2 * step)).item()


def test_the_gradient_of_the_true_reward_is_the_derivative():
    levels = to_levels(miniature_videos())
    scorer = MiniatureScorer(MINIATURE)
    found = derivatives_along_gradient(
        lambda videos: scorer.score_with_gradient(videos, CAPTIONS[:2], fps=FPS).sum(), levels, 0.03
    )
    # it has kinks where two channels are equal
    assert found[0] == pytest.approx(found[1], rel=0.05)


def test_the_gradient_of_videoalign_is_the_derivative_where_no_pixel_is_rounded(monkeypatch):
    """Frames that have the model's size already are neither resized nor rounded."""
    scorer = VideoAlignScorer(GOLDEN / "VideoReward", base=GOLDEN / "base", dtype=torch.float32)
    monkeypatch.setattr(scorer, "settings", dataclasses.replace(scorer.settings, min_pixels=4704))
    torch.manual_seed(0)
    levels = torch.randint(20, 230, (1, 8, 3, 56, 84)).float()
    sampled = frame_indices(8, 4.0, fps=scorer.settings.fps, num_sampled=scorer.settings.num_frames)
    found = derivatives_along_gradient(
        lambda videos: scorer.score_with_gradient(videos, ["a cat"], fps=4.0).sum(), levels, 0.1
    )
    assert found[0] == pytest.approx(found[1], rel=0.02)
    leaf = levels.clone().requires_grad_()
    scorer.score_with_gradient(leaf, ["a cat"], fps=4.0).sum().backward()
    is_read = leaf.grad.abs().amax((0, 2, 3, 4)) > 0
    assert is_read.nonzero().flatten().tolist() == sampled and len(sampled) < 8


def test_the_gradient_of_resizing_ignores_the_rounding():
    torch.manual_seed(0)
    frames = torch.randint(0, 256, (2, 3, 40, 70)).float().requires_grad_()
    resized = resize(frames, max_pixels=3136, min_pixels=3136)
    assert torch.equal(
        resized.to(torch.uint8),
        resize(frames.detach().to(torch.uint8), max_pixels=3136, min_pixels=3136),
    )
    weights = torch.randn_like(resized)
    plain = F.interpolate(
        frames, resized.shape[-2:], mode="bicubic", align_corners=False, antialias=True
    ).clamp(0, 255)
    found, expected = (
        torch.autograd.grad((each * weights).sum(), frames)[0] for each in (resized, plain)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", [(40, 70), (70, 41), (32, 32)])
def test_clip_gradient_follows_what_its_image_processor_does(clip_folder, size):
    """The processor resizes with PIL, whose values differ from torch's by rounding."""
    scorer = ClipScorer(clip_folder)
    torch.manual_seed(0)
    small = torch.rand(1, 3, size[0] // 4, size[1] // 4)
    frame = to_levels(F.interpolate(small, size, mode="bicubic")[0] * 1.6 - 0.8)
    exact = scorer.image_processor(
        [frame.to(torch.uint8)], input_data_format="channels_first", return_tensors="pt"
    )
    assert (scorer._resized(frame) - exact.pixel_values[0]).abs().max() < 2 / 255 / 0.25


def test_a_detached_score_is_an_error_that_says_so():
    class Detached(Scorer):
        def score_with_gradient(self, videos, prompts, *, fps):
            return videos.mean((1, 2, 3, 4)).detach()[:, None].expand(-1, 3)

    class Wrong(Scorer):
        def score_with_gradient(self, videos, prompts, *, fps):
            return videos.mean()

    videos = torch.zeros(2, 4, 3, 8, 8, requires_grad=True)
    with pytest.raises(ValueError, match="detached"):
        contract.score_with_gradient(Detached(), videos, ["a", "b"], fps=8.0)
    with pytest.raises(ValueError, match=r"of Wrong .*shape \(2, 3\), got .* of shape \(\)"):
        contract.score_with_gradient(Wrong(), videos, ["a", "b"], fps=8.0)
