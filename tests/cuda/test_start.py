"""The device of the thread that scores the rewards, on a GPU; on a CPU only the code runs."""

import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.cuda.workload import DEVICE

pytestmark = pytest.mark.cuda

SCORE = """
import torch
from hyvideo.rewards.scoring import AsyncScorer

class Brightness:
    def score(self, videos, prompts, *, fps):
        return [{"VQ": video.to("cuda:1").float().mean().item()} for video in videos]

torch.cuda.set_device(1)
scorer = AsyncScorer({"test": Brightness()}, {"VQ": 1.0}, device=torch.device("cuda", 1))
scorer.measure([torch.zeros(2, 3, 8, 8, dtype=torch.uint8)], [""], fps=8)
print(torch._C._cuda_hasPrimaryContext(0), torch._C._cuda_hasPrimaryContext(1))
scorer.close()
"""


def test_scoring_creates_no_context_on_another_gpu(gpu, record):
    """Needs two GPUs."""
    record({"GPUs": torch.cuda.device_count() if DEVICE.type == "cuda" else 0})
    if DEVICE.type == "cuda" and torch.cuda.device_count() > 1:
        done = subprocess.run(
            [sys.executable, "-c", SCORE], cwd=ROOT, capture_output=True, text=True, timeout=100
        )
        assert done.stdout.split() == ["False", "True"], done.stderr
