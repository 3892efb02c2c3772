"""What the reward service and its client send each other: frames as safetensors, scores as JSON. Nothing is unpickled.

A request is a safetensors file: ``video.0``, ``video.1``... uint8 (frames, 3, height, width), or the bytes of an mp4 as
``mp4.0``; prompts and frames per second are in its metadata. An answer is a JSON object with one entry per video in
``scores`` (numbers by dimension, or null) and in ``reasons``.
"""

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hyvideo.models.reward_models.rewards import Verdict
from hyvideo.video_io import read_video

_MAX_HEADER = 2**20  # bytes


@dataclass(frozen=True)
class Limits:
    """What a request may ask for."""

    body: int = 2**30  # bytes
    videos: int = 64
    frames: int = 1024  # of a video
    pixels: int = 2**22  # of a frame


class BadRequest(ValueError):
    """A request that cannot be served; ``is_too_large`` tells the two kinds apart."""

    def __init__(self, message: str, *, is_too_large: bool = False):
        super().__init__(message)
        self.is_too_large = is_too_large


@dataclass(frozen=True)
class ScoreRequest:
    videos: list[Tensor]
    prompts: list[str]
    fps: float


def encode_request(request: ScoreRequest) -> bytes:
    # Copies: safetensors refuses videos that share their memory.
    tensors = {f"video.{i}": v.clone(memory_format=torch.contiguous_format) for i, v in enumerate(request.videos)}
    return save(tensors, metadata={"prompts": json.dumps(request.prompts), "fps": repr(float(request.fps))})


def decode_request(body: bytes, limits: Limits) -> ScoreRequest:
    """The request, its claims checked before anything is made of them.

    Raises: BadRequest, naming the rule, what was got and the limit.
    """
    if len(body) > limits.body:
        raise BadRequest(f"a request may have {limits.body} bytes, got {len(body)}", is_too_large=True)
    header = _header(body)
    metadata = header.pop("__metadata__", None) or {}
    prompts, fps = _prompts(metadata), _fps(metadata)
    if len(prompts) > limits.videos:
        raise BadRequest(f"a request may have {limits.videos} videos, got {len(prompts)}", is_too_large=True)
    names = [_name_of(i, header) for i in range(len(prompts))]
    if unknown := set(header) - set(names):
        raise BadRequest(
            f"a request has one tensor video.N or mp4.N for each prompt, got {sorted(unknown)[:3]} besides"
        )
    for name in names:
        _check_entry(name, header[name], limits)
    try:
        tensors = load(body)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise BadRequest(f"the body is no safetensors file: {error}") from error
    videos, rates = zip(*(_video(name, tensors[name], fps, limits) for name in names))
    if len(set(rates)) > 1:
        raise BadRequest(f"all videos of a request must have one rate of frames, got {sorted(set(rates))}")
    return ScoreRequest(list(videos), prompts, rates[0])


def encode_answer(verdicts: list[Verdict]) -> dict:
    """JSON for verdicts; a number that is not finite is null."""
    scores = [None if v.reason else {n: x if math.isfinite(x) else None for n, x in v.scores.items()} for v in verdicts]
    return {"scores": scores, "reasons": [verdict.reason for verdict in verdicts]}


def decode_answer(body: bytes, num_videos: int) -> list[Verdict]:
    """Verdicts of an answer. Raises ValueError for what is no answer to a request of so many videos."""
    answer = json.loads(body)  # JSONDecodeError and UnicodeDecodeError are ValueErrors
    scores = answer.get("scores") if isinstance(answer, dict) else None
    reasons = (answer.get("reasons") if isinstance(answer, dict) else None) or [None] * num_videos
    if not isinstance(scores, list) or len(scores) != num_videos or len(reasons) != num_videos:
        raise ValueError(f"an answer needs scores of {num_videos} videos, got {str(answer)[:200]}")
    return [_verdict(one, reason) for one, reason in zip(scores, reasons)]


def _verdict(scores: object, reason: object) -> Verdict:
    if scores is None:
        return Verdict({}, str(reason or "the service gave no score and no reason"))
    numbers = (int, float, type(None))
    if not isinstance(scores, dict) or not all(
        isinstance(value, numbers) and not isinstance(value, bool) for value in scores.values()
    ):
        raise ValueError(f"scores must be numbers by dimension, got {str(scores)[:200]}")
    return Verdict({name: math.nan if value is None else float(value) for name, value in scores.items()})


def _header(body: bytes) -> dict:
    length = int.from_bytes(body[:8], "little") if len(body) >= 8 else 0
    if not 0 < length <= min(_MAX_HEADER, len(body) - 8):
        raise BadRequest("the body must be a safetensors file, got something else")
    try:
        header = json.loads(body[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the header of the body is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise BadRequest("the header of the body must be a JSON object")
    return header


def _prompts(metadata: object) -> list[str]:
    try:
        prompts = json.loads(metadata["prompts"])
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise BadRequest("the metadata needs `prompts`, a JSON list of strings") from error
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise BadRequest("`prompts` in the metadata must be a JSON list of at least one string")
    return prompts


def _fps(metadata: dict) -> float:
    try:
        fps = float(metadata["fps"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest("the metadata needs `fps`, frames per second, and never a guess") from error
    if not 0 < fps <= 1000:
        raise BadRequest(f"`fps` must be above 0 and at most 1000, got {fps}")
    return fps


def _name_of(number: int, header: dict) -> str:
    for name in (f"video.{number}", f"mp4.{number}"):
        if name in header:
            return name
    raise BadRequest(f"prompt {number} has no tensor video.{number} or mp4.{number}")


def _check_entry(name: str, entry: object, limits: Limits) -> None:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or entry.get("dtype") != "U8" or not all(isinstance(n, int) for n in shape):
        raise BadRequest(f"tensor {name} must be uint8")
    if name.startswith("mp4."):
        if len(shape) != 1:
            raise BadRequest(f"tensor {name} must be the bytes of a file, got shape {shape}")
        return
    if len(shape) != 4 or shape[1] != 3 or 0 in shape:
        raise BadRequest(f"tensor {name} must be (frames, 3, height, width), got {shape}")
    _check_size(name, shape, limits)


def _check_size(name: str, shape: list[int], limits: Limits) -> None:
    if shape[0] > limits.frames or shape[2] * shape[3] > limits.pixels:
        raise BadRequest(
            f"{name} may have {limits.frames} frames of {limits.pixels} pixels, got {shape}", is_too_large=True
        )


def _video(name: str, tensor: Tensor, fps: float, limits: Limits) -> tuple[Tensor, float]:
    if name.startswith("video."):
        return tensor, fps
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        Path(file.name).write_bytes(tensor.numpy().tobytes())
        try:
            video, rate = read_video(file.name)
        except (ValueError, OSError) as error:
            raise BadRequest(f"{name} is no readable mp4") from error
    _check_size(name, list(video.shape), limits)
    return video.to(torch.uint8), rate
