"""The example of an HPSv3 reward with a module that stands for the package, which is not installed here."""

import sys
import types

import torch
from PIL import Image

from hyvideo.models.reward_models.rewards import make_scorer, scorer_class


def test_the_score_is_the_mean_over_frames_and_a_missing_package_is_named(monkeypatch):
    seen = []

    class Inferencer:
        def __init__(self, device):
            assert device == "cpu"

        def reward(self, image_paths, prompts):
            shades = [Image.open(path).getpixel((3, 2))[0] for path in image_paths]
            seen.append((shades, prompts))
            return torch.tensor([[shade, 99.0] for shade in shades])  # mean and deviation

    name = "examples/hpsv3_reward.py:HPSv3"
    try:
        scorer_class(name)
    except ValueError as error:
        assert "No module named 'hpsv3'" in str(error)
    monkeypatch.setitem(sys.modules, "hpsv3", types.SimpleNamespace(HPSv3RewardInferencer=Inferencer))
    video = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 3, 8, 8)
    scores = make_scorer(name, ".", num_frames=3).score([video, video[:1]], ["a", "b"], fps=8)
    assert scores == [{"HPSv3": (0 + 4 + 9) / 3}, {"HPSv3": 0.0}]
    assert seen == [([0, 4, 9], ["a"] * 3), ([0, 0, 0], ["b"] * 3)]
