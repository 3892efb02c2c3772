"""Trial videos for checking scorers, each with its prompt and a prompt that does not fit."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hyvideo.data.videos import to_uint8


@dataclass(frozen=True)
class Trial:
    """A video with its prompt."""

    video: Tensor  # uint8 (frames, 3, height, width)
    prompt: str
    fps: float  # frames per second
    # does not fit the video
    foreign_prompt: str = "a bowl of green soup on a wooden table, seen from above"


def synthetic_trial(
    num_frames: int = 49, height: int = 256, width: int = 448, fps: float = 24.0
) -> Trial:
    """Render a red ball before a textured wall that moves the opposite way, for scorers trained on
    natural videos.
    """
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.uniform(0.25, 0.65, (1, 1, height // 8, width // 8))).float()
    wall = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic", antialias=True)[
        0
    ]
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    frames = []
    for time in torch.linspace(0, 1, num_frames):
        center_x = width * (0.2 + 0.6 * time)
        center_y = height * (0.6 - 0.2 * math.sin(math.pi * time))
        distance = ((x - center_x) ** 2 + (y - center_y) ** 2).sqrt() - height / 6
        cover = torch.sigmoid(-distance / 1.5)
        behind = wall.roll(-int(width / 8 * time), dims=-1).expand(3, -1, -1)
        frames.append(behind * (1 - cover) + torch.tensor([0.9, 0.1, 0.1])[:, None, None] * cover)
    prompt = "a bright red ball flies from left to right in front of a grey stone wall"
    return Trial(to_uint8(torch.stack(frames) * 2 - 1), prompt, fps)


def noisy(video: Tensor, strength: float = 40.0) -> Tensor:
    """Add fixed Gaussian noise with a standard deviation of ``strength`` gray levels.

    Shape: as ``video``.
    """
    generator = torch.Generator().manual_seed(0)
    noisy_frames = []
    # frame by frame, because a long video in float32 would take gigabytes
    for frame in video.cpu():
        noise = strength * torch.randn(frame.shape, generator=generator)
        noisy_frames.append((frame + noise).round().clamp(0, 255).to(torch.uint8))
    return torch.stack(noisy_frames).to(video.device)
