"""Messages between the reward service and its client: frames as safetensors, scores as JSON, no
pickle.

The tensors of a request are the videos, uint8 (frames, 3, height, width) with the names ``0``,
``1``..., the frames per second ``fps``, and the bytes of a JSON list, ``prompts``.
"""

import json

import numpy as np
import torch
from pydantic import BaseModel, TypeAdapter
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from hyvideo.data.video_files import check_fps
from hyvideo.data.videos import check_video

PROMPTS = TypeAdapter(list[str])


class Scored(BaseModel):
    """Scores of each video by dimension, None if not finite, or the reason why they are missing."""

    scores: list[dict[str, float | None]]
    reasons: list[str | None]
    identity: str  # of the scorer; the rewards of a run must not change their meaning


class Checked(BaseModel):
    """The reason why a prompt cannot be scored; None if all can."""

    problem: str | None
    identity: str


def encode_request(videos: list[Tensor], prompts: list[str], fps: float) -> bytes:
    arrays = {
        str(number): np.ascontiguousarray(video.cpu().numpy())
        for number, video in enumerate(videos)
    }
    arrays["prompts"] = np.frombuffer(json.dumps(prompts).encode(), np.uint8)
    arrays["fps"] = np.array(fps, np.float64)
    return save(arrays)


def decode_request(body: bytes) -> tuple[list[Tensor], list[str], float]:
    """Return videos, prompts and frames per second. Raises ValueError if they are invalid."""
    try:
        arrays = load(body)
        prompts = PROMPTS.validate_json(arrays["prompts"].tobytes())
        videos = [torch.from_numpy(arrays[str(number)]) for number in range(len(prompts))]
        fps = arrays["fps"].item()
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"invalid request: {error!r:.300}") from error
    for video in videos:
        check_video(video)
    check_fps(fps)
    return videos, prompts, fps
