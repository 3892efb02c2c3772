"""HPSv3 of the released size with random weights: seconds and memory of scoring a video, and the
scores of the released program.
"""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from hyvideo.rewards import tiny
from hyvideo.rewards.hpsv3 import HPSv3Scorer
from hyvideo.rewards.hpsv3 import scorer as scorer_module
from tests.cuda.qwen2_vl import enlarge
from tests.cuda.speed import peak_gib, seconds_of
from tests.cuda.workload import DEVICE, IS_TINY
from tests.forked import ROOT

pytestmark = pytest.mark.cuda
GOLDEN = ROOT / "tests" / "golden" / "hpsv3"
SIZE = (9, 64, 64) if IS_TINY else (81, 480, 832)


@pytest.fixture(scope="module")
def scorer(gpu, tmp_path_factory):
    """A scorer with the released sizes except the vocabulary: its tokenizer is the miniature's."""
    folder = tmp_path_factory.mktemp("rewards") / "hpsv3"
    tiny.write("hpsv3", folder)
    if IS_TINY:
        return HPSv3Scorer(folder, device=DEVICE)
    width, weights = enlarge(folder / "config.json", GOLDEN / "qwen2_vl_7b.json")
    head = torch.nn.Sequential(
        torch.nn.Linear(width, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 2),
    )
    with pytest.MonkeyPatch.context() as patch:  # 15.5 GB that need not be written to a file
        patch.setattr(scorer_module, "read_weights", lambda path: (weights, head))
        return HPSv3Scorer(folder, device=DEVICE)


def test_hpsv3(scorer, record):
    """Records the seconds to score 8 frames, and the memory that the scorer needs beyond its
    weights.
    """
    generator = torch.Generator().manual_seed(0)
    frames, height, width = SIZE
    video = torch.randint(256, (frames, 3, height, width), dtype=torch.uint8, generator=generator)
    found = []

    def score():
        found.extend(scorer.score([video], ["a cat"], fps=16.0))

    score()
    record({"parameters": sum(parameter.numel() for parameter in scorer.model.parameters())})
    record({"s": seconds_of(score, DEVICE)})
    record({"peak GiB beyond the weights": peak_gib(score, DEVICE)})
    assert torch.tensor(list(found[-1].values())).isfinite().all()
    assert found[0] == found[1]


def test_hpsv3_with_gradient(scorer, record):
    """Records the seconds and the memory of scoring a video with its gradient."""
    frames, height, width = SIZE
    levels = (255 * torch.rand(1, frames, 3, height, width, device=DEVICE)).round()
    levels.requires_grad_()

    def score():
        scores = scorer.score_with_gradient(levels, ["a cat"], fps=16.0)
        return torch.autograd.grad(scores[:, 0].sum(), levels)[0]

    gradient = score()
    record({"s": seconds_of(score, DEVICE)})
    record({"peak GiB beyond the weights": peak_gib(score, DEVICE)})
    assert gradient.isfinite().all() and gradient.norm() > 0


def test_scores_are_those_of_the_released_program(gpu):
    golden = json.loads((GOLDEN / "golden.json").read_text())
    scorer = HPSv3Scorer(GOLDEN, base=GOLDEN / "base", device=DEVICE)
    for name, prompt, expected in zip(golden["images"], golden["prompts"], golden["bf16"]):
        picture = torch.from_numpy(np.array(Image.open(GOLDEN / name).convert("RGB")))
        (row,) = scorer.score([picture.permute(2, 0, 1)[None]], [prompt], fps=16.0)
        assert row["HPSv3"] == pytest.approx(expected[0], abs=0.1)
