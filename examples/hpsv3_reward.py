"""HPSv3 as a custom reward: the mean over frames of an image reward, which does not see motion. Not run.

    python -m scripts.check_reward --reward_model examples/hpsv3_reward.py:HPSv3

It needs the package hpsv3. If its requirements conflict with those of the training, install it in a separate
environment and serve it from there with ``python -m scripts.reward_server``.
"""

import tempfile

import torch
from hpsv3 import HPSv3RewardInferencer
from PIL import Image

from hyvideo.models.reward_models.rewards import Scorer


class HPSv3(Scorer):
    """Scorer of frames by HPSv3, about -2 to 12; ``num_frames`` are evenly spaced."""

    dimensions = ("HPSv3",)

    def __init__(self, device, num_frames: int = 4):
        self.model, self.num_frames = HPSv3RewardInferencer(device=str(device)), num_frames

    def score(self, videos, prompts, *, fps):
        return [{"HPSv3": self._mean(video, prompt)} for video, prompt in zip(videos, prompts)]

    def _mean(self, video, prompt):
        rows = torch.linspace(0, len(video) - 1, self.num_frames).round().long()
        with tempfile.TemporaryDirectory() as folder:
            paths = [f"{folder}/{number}.png" for number in range(len(rows))]
            for path, frame in zip(paths, video[rows].permute(0, 2, 3, 1).cpu().numpy()):
                Image.fromarray(frame).save(path)
            # By keyword: releases of the package differ in the order of these arguments.
            results = self.model.reward(prompts=[prompt] * len(paths), image_paths=paths)
        return sum(result[0].item() for result in results) / len(paths)
