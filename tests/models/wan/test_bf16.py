"""The VAE in bf16, the default of Wan's versions: its error in pixels, and in scores beside that of
the scorer's own rounding.
"""

import pytest
import torch

from hyvideo.data.videos import to_uint8
from hyvideo.models.loading import load_vae
from hyvideo.rewards import tiny
from hyvideo.rewards.videoalign.scorer import VideoAlignScorer
from tests.conftest import ROOT

NUM_VIDEOS = 4


def decoded(num_videos):
    """Return videos of the miniature in levels, decoded in float32 and in bf16, by dtype."""
    latents = torch.randn(num_videos, 4, 2, 8, 12, generator=torch.Generator().manual_seed(0))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        vae = load_vae(ROOT / "assets/miniature_wan", dtype=dtype)
        with torch.no_grad():
            found[dtype] = vae.decode(latents.to(dtype), return_dict=False)[0].float()
    return found


def test_bf16_changes_pixels_by_a_fraction_of_a_level():
    videos = decoded(1)
    error = 127.5 * (videos[torch.bfloat16] - videos[torch.float32])
    assert error.square().mean().sqrt() < 0.4
    assert error.mean().abs() < 0.1 and error.abs().max() < 5


@pytest.mark.slow
def test_scores_change_less_than_by_the_rounding_of_the_scorer(tmp_path):
    tiny.write("videoalign", tmp_path / "scorer")
    videos = decoded(NUM_VIDEOS)

    def scores(dtype, precision):
        scorer = VideoAlignScorer(tmp_path / "scorer", device="cpu", precision=precision)
        clips = [to_uint8(video.transpose(0, 1)) for video in videos[dtype]]
        rows = scorer.score(clips, ["a red circle"] * NUM_VIDEOS, fps=8.0, normalize=False)
        return torch.tensor([list(row.values()) for row in rows])

    exact = scores(torch.float32, "fp32_math")
    by_vae = (scores(torch.bfloat16, "fp32_math") - exact).abs().mean()
    by_scorer = (scores(torch.float32, "bf16") - exact).abs().mean()
    assert 0 < by_vae < by_scorer / 20
