"""Messages between the reward service and its client: frames as safetensors, scores as JSON, no
pickle.

A request is a safetensors file with tensors ``video.0``, ``video.1``..., uint8 (frames, 3, height,
width), and prompts and frames per second in its metadata. An answer is a JSON object with one entry
per video in ``scores`` (numbers by dimension, or null) and in ``reasons``.
"""

import json
import math
from dataclasses import dataclass
from types import NoneType

import numpy as np
import torch
from torch import Tensor

from hyvideo.data.files import parse_json
from hyvideo.data.text import MAX_PROMPT_BYTES, text_problem
from hyvideo.rewards.rewards import ScoreResult, as_score, is_finite
from hyvideo.rewards.service.limits import Limits

_MAX_HEADER = 2**20  # bytes


class BadRequest(ValueError):
    """A request that cannot be served."""


@dataclass(frozen=True)
class ScoreRequest:
    videos: list[Tensor]
    prompts: list[str]
    fps: float


def encode_request(request: ScoreRequest) -> list[memoryview]:
    """Return the consecutive parts of a request, without a copy of videos that are on the CPU and
    contiguous.
    """
    header: dict[str, dict] = {
        "__metadata__": {"prompts": json.dumps(request.prompts), "fps": repr(float(request.fps))}
    }
    frames, end = [], 0
    for number, video in enumerate(request.videos):
        frames.append(memoryview(video.cpu().contiguous().view(-1).numpy()))
        start, end = end, end + len(frames[-1])
        header[f"video.{number}"] = {
            "dtype": "U8",
            "shape": list(video.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the tensors
    return [memoryview(len(text).to_bytes(8, "little") + text), *frames]


def decode_request(body: bytearray, limits: Limits) -> ScoreRequest:
    """Decode a request. The videos share the memory of ``body``.

    Raises BadRequest if it is invalid.
    """
    if len(body) > limits.body:
        raise BadRequest(f"a request may have at most {limits.body} bytes, got {len(body)}")
    header, first = _header(body)
    prompts, fps = _metadata(header.pop("__metadata__", None))
    if len(prompts) > limits.videos:
        raise BadRequest(f"a request may have at most {limits.videos} videos, got {len(prompts)}")
    names = [f"video.{number}" for number in range(len(prompts))]
    if header.keys() != set(names):
        raise BadRequest(
            f"a request needs one tensor video.N per prompt ({len(names)}), got "
            f"{list(header)!r:.200}"
        )
    return ScoreRequest(
        [_video(name, header[name], body, first, limits) for name in names], prompts, fps
    )


def _header(body: bytearray) -> tuple[dict, int]:
    """Return the header and the position of the first byte after it."""
    length = int.from_bytes(body[:8], "little")
    try:
        header = (
            parse_json(body[8 : 8 + length]) if length <= min(_MAX_HEADER, len(body) - 8) else None
        )
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise BadRequest(
            f"the body must be a safetensors file with a header of at most {_MAX_HEADER} bytes"
        )
    return header, 8 + length


def _metadata(metadata: object) -> tuple[list[str], float]:
    try:
        prompts, fps = check_texts(parse_json(metadata["prompts"])), float(metadata["fps"])
        if prompts and 0 < fps <= 1000:
            return prompts, fps
        problem = f"got {len(prompts)} prompts and {fps} frames per second"
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        problem = f"{error!s:.200}"
    raise BadRequest(
        "the metadata needs `prompts`, a JSON list of at least one string, and `fps`, a number "
        f"above 0 and at most 1000: {problem}"
    )


def _video(name: str, entry: object, body: bytearray, first: int, limits: Limits) -> Tensor:
    """Return the video that ``entry`` of the header describes; offsets count from byte ``first`` of
    the body.
    """
    shape = entry.get("shape") if isinstance(entry, dict) and entry.get("dtype") == "U8" else None
    is_shape = (
        isinstance(shape, list)
        and len(shape) == 4
        and all(isinstance(n, int) and n > 0 for n in shape)
    )
    if not is_shape or shape[1] != 3:
        raise BadRequest(
            f"tensor {name} must be uint8 (frames, 3, height, width), got {entry!r:.200}"
        )
    if shape[0] > limits.frames or shape[2] * shape[3] > limits.pixels:
        raise BadRequest(
            f"{name} may have at most {limits.frames} frames of {limits.pixels} pixels, got {shape}"
        )
    offsets = entry.get("data_offsets")
    size = math.prod(shape)
    available = len(body) - first
    are_integers = (
        isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(n, int) for n in offsets)
    )
    if (
        not are_integers
        or not 0 <= offsets[0] <= offsets[1] <= available
        or offsets[1] - offsets[0] != size
    ):
        raise BadRequest(
            f"data_offsets of {name} must enclose {size} bytes of the body, got {offsets!r:.100} "
            f"of {available} bytes"
        )
    return torch.from_numpy(np.frombuffer(body, np.uint8, size, first + offsets[0]).reshape(shape))


def check_texts(prompts: object) -> list[str]:
    """Return ``prompts`` unchanged. Raises ValueError unless it is a list of valid prompts."""
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("prompts must be a list of strings")
    for number, prompt in enumerate(prompts):
        if problem := text_problem(prompt, MAX_PROMPT_BYTES):
            raise ValueError(f"prompt {number} cannot be scored: {problem}")
    return prompts


def encode_answer(results: list[ScoreResult]) -> dict:
    """Return the results as a JSON object; a score that is not a finite number becomes null."""
    scores = [
        None
        if r.reason
        else {
            name: value if is_finite(r.scores, name) else None for name, value in r.scores.items()
        }
        for r in results
    ]
    return {"scores": scores, "reasons": [r.reason and printable(r.reason) for r in results]}


def decode_answer(body: bytes, num_videos: int) -> list[ScoreResult]:
    """Decode an answer.

    Raises ValueError unless it is valid and has results for ``num_videos`` videos.
    """
    answer = parse_json(body)
    content = answer if isinstance(answer, dict) else {}
    scores, reasons = content.get("scores"), content.get("reasons") or [None] * num_videos
    if not all(isinstance(part, list) and len(part) == num_videos for part in (scores, reasons)):
        raise ValueError(f"an answer must have scores of {num_videos} videos, got {answer!r:.200}")
    return [_result(row, reason) for row, reason in zip(scores, reasons)]


def _result(scores: object, reason: object) -> ScoreResult:
    if scores is None:
        return ScoreResult(
            {}, printable(str(reason or "the service returned neither scores nor a reason"))
        )
    if not isinstance(scores, dict) or not all(
        type(value) in (int, float, NoneType) for value in scores.values()
    ):
        raise ValueError(f"scores must be numbers by dimension, got {scores!r:.200}")
    return ScoreResult(
        {name: math.nan if value is None else as_score(value) for name, value in scores.items()}
    )


def printable(text: str) -> str:
    """Return ``text`` with characters that UTF-8 cannot encode replaced by escapes."""
    return text.encode(errors="backslashreplace").decode()
