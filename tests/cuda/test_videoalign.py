"""VideoAlign of the released size with random weights: seconds and memory of scoring the videos of
a recipe.
"""

from pathlib import Path

import pytest
import torch

from hyvideo.rewards import tiny
from hyvideo.rewards.videoalign import scorer as scorer_module
from hyvideo.rewards.videoalign.checkpoint import VideoAlignWeights
from hyvideo.rewards.videoalign.scorer import VideoAlignScorer
from tests.cuda.qwen2_vl import enlarge
from tests.cuda.recipes import recipe
from tests.cuda.speed import peak_gib, seconds_of
from tests.cuda.workload import DEVICE, IS_TINY

pytestmark = pytest.mark.cuda
RELEASED = Path(scorer_module.__file__).with_name("qwen2_vl_2b.json")


@pytest.fixture(scope="module")
def scorer(gpu, tmp_path_factory):
    """A scorer with the released sizes except the vocabulary: its tokenizer is the miniature's."""
    folder = tmp_path_factory.mktemp("rewards") / "videoalign"
    tiny.write("videoalign", folder)
    if IS_TINY:
        return VideoAlignScorer(folder, device=DEVICE)
    width, weights = enlarge(folder / "base" / "config.json", RELEASED)
    head = torch.randn(1, width)
    with pytest.MonkeyPatch.context() as patch:  # 4.4 GB that need not be written to a file
        patch.setattr(
            scorer_module, "read_weights", lambda checkpoint: VideoAlignWeights(weights, head)
        )
        return VideoAlignScorer(folder, device=DEVICE)


@pytest.mark.parametrize("name", ["hunyuanvideo15_480p_8gpu_nft", "wan21_1gpu_nft"])
def test_videoalign(scorer, record, name):
    """Records the seconds to score four videos, and the memory that the scorer needs beyond its
    weights.
    """
    config = recipe(name).config
    frames, height, width = (9, 64, 64) if IS_TINY else config.sampling.size
    generator = torch.Generator().manual_seed(0)
    videos = [
        torch.randint(256, (frames, 3, height, width), dtype=torch.uint8, generator=generator)
        for _ in range(4)
    ]
    found = []

    def score():
        found.append(scorer.score(videos, ["a cat"] * 4, fps=config.data.fps))

    score()
    record({"parameters": sum(parameter.numel() for parameter in scorer.model.parameters())})
    record({"s": seconds_of(score, DEVICE)})
    record({"peak GiB beyond the weights": peak_gib(score, DEVICE)})
    assert all(torch.tensor(list(row.values())).isfinite().all() for row in found[-1])
    assert found[0] == found[1]


def test_videoalign_with_gradient(scorer, record):
    """Records the seconds and the memory of scoring a video of the draft recipe with its
    gradient.
    """
    config = recipe("hunyuanvideo15_480p_8gpu_draft").config
    frames, height, width = (9, 64, 64) if IS_TINY else config.sampling.size
    levels = 255 * torch.rand(1, frames, 3, height, width, device=DEVICE)
    levels.requires_grad_()

    def score():
        scores = scorer.score_with_gradient(levels, ["a cat"], fps=config.data.fps)
        return torch.autograd.grad(scores.sum(), levels)[0]

    gradient = score()
    record({"s": seconds_of(score, DEVICE)})
    record({"peak GiB beyond the weights": peak_gib(score, DEVICE)})
    assert gradient.isfinite().all() and gradient.norm() > 0
