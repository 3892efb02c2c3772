"""Messages between the reward service and its client: frames as safetensors, scores as JSON. Nothing is unpickled.

A request is a safetensors file: ``video.0``, ``video.1``... uint8 (frames, 3, height, width), or the bytes of an mp4 as
``mp4.0``; prompts and frames per second are in its metadata. An answer is a JSON object with one entry per video in
``scores`` (numbers by dimension, or null) and in ``reasons``.
"""

import itertools
import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import av
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hyvideo.data.outside import parse_json
from hyvideo.data.videos import read_video
from hyvideo.models.reward_models.rewards import ScoreResult

_MAX_HEADER = 2**20  # bytes


@dataclass(frozen=True)
class Limits:
    """Upper bounds of a request."""

    body: int = 2**30  # bytes, with all films decoded too
    seconds: float = 300.0  # for the body to arrive
    videos: int = 64
    frames: int = 1024  # of a video
    pixels: int = 2**22  # of a frame


class BadRequest(ValueError):
    """A request that cannot be served, too large or of another form."""

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
    """The request, its header checked before any tensor is made.

    Raises:
        BadRequest: Names the rule, what was got and the limit.
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
    videos, rates, room = [], set(), limits.body
    for name in names:
        video, rate = _video(name, tensors[name], fps, limits, room)
        videos.append(video)
        rates.add(rate)
        room -= video.numel()
    if len(rates) > 1:
        raise BadRequest(f"all videos of a request must have one rate of frames, got {sorted(rates)}")
    return ScoreRequest(videos, prompts, rates.pop())


def encode_answer(results: list[ScoreResult]) -> dict:
    """JSON of the results; a score that is not a finite number is null."""
    scores = [None if r.reason else {name: _finite(x) for name, x in r.scores.items()} for r in results]
    reasons = [r.reason and printable(r.reason) for r in results]
    return {"scores": scores, "reasons": reasons}


def printable(text: str) -> str:
    """``text`` with escapes in place of characters that UTF-8 lacks: a message may quote anything."""
    return text.encode(errors="backslashreplace").decode()


def _finite(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def decode_answer(body: bytes, num_videos: int) -> list[ScoreResult]:
    """Results in an answer. Raises ValueError for what is no answer to a request of so many videos."""
    answer = parse_json(body)
    if not isinstance(answer, dict):
        raise ValueError(f"an answer must be an object with scores of {num_videos} videos, got {answer!r:.200}")
    scores, reasons = answer.get("scores"), answer.get("reasons") or [None] * num_videos
    if not all(isinstance(part, list) and len(part) == num_videos for part in (scores, reasons)):
        raise ValueError(f"an answer needs scores of {num_videos} videos, got {answer!r:.200}")
    return [_result(row, reason) for row, reason in zip(scores, reasons)]


def _result(scores: object, reason: object) -> ScoreResult:
    if scores is None:
        return ScoreResult({}, printable(str(reason or "the service gave no score and no reason")))
    if not isinstance(scores, dict):
        raise ValueError(f"scores must be numbers by dimension, got {scores!r:.200}")
    return ScoreResult({name: _number(value) for name, value in scores.items()})


def _number(value: object) -> float:
    """A score as it was sent, null as NaN."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"scores must be numbers by dimension, got {value!r:.200}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("scores must be numbers, got an integer beyond all floats") from error


def check_texts(prompts: object) -> list[str]:
    """``prompts``, if they are a list of strings that are text. Raises ValueError."""
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("prompts must be a list of strings")
    if broken := [number for number, prompt in enumerate(prompts) if not _is_text(prompt)]:
        raise ValueError(f"prompts must be text that has UTF-8; half a surrogate pair is in prompt {broken[0]}")
    return prompts


def _is_text(prompt: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in prompt)


def _header(body: bytes) -> dict:
    length = int.from_bytes(body[:8], "little") if len(body) >= 8 else 0
    if not 0 < length <= min(_MAX_HEADER, len(body) - 8):
        raise BadRequest("the body must be a safetensors file, got something else")
    try:
        header = parse_json(body[8 : 8 + length])
    except ValueError as error:
        raise BadRequest(f"the header of the body is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise BadRequest("the header of the body must be a JSON object")
    return header


def _prompts(metadata: object) -> list[str]:
    try:
        prompts = check_texts(parse_json(metadata["prompts"]))
    except (TypeError, KeyError) as error:
        raise BadRequest("the metadata needs `prompts`, a JSON list of strings") from error
    except ValueError as error:
        raise BadRequest(f"`prompts` in the metadata cannot be used: {error}") from error
    if not prompts:
        raise BadRequest("`prompts` in the metadata must have at least one string")
    return prompts


def _fps(metadata: dict) -> float:
    try:
        fps = float(metadata["fps"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadRequest("the metadata needs `fps`, frames per second, and never a guess") from error
    return _check_rate("`fps`", fps)


def _check_rate(name: str, fps: float) -> float:
    if not 0 < fps <= 1000:
        raise BadRequest(f"{name} must be above 0 and at most 1000 frames per second, got {fps}")
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


def _video(name: str, tensor: Tensor, fps: float, limits: Limits, room: int) -> tuple[Tensor, float]:
    """The frames of an entry and their rate; a film may have ``room`` bytes when it is decoded."""
    if name.startswith("video."):
        return tensor, fps
    content = tensor.numpy().tobytes()
    # FFmpeg goes by content: a playlist in place of a film would have it open other files of this machine.
    if content[4:8] != b"ftyp":
        raise BadRequest(f"{name} is no mp4")
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        Path(file.name).write_bytes(content)
        try:
            video, rate = read_video(file.name, max_frames=_film_length(name, file.name, limits, room))
        except BadRequest:
            raise
        except (av.FFmpegError, ValueError, OSError) as error:
            raise BadRequest(f"{name} is no readable mp4") from error
    return video, _check_rate(name, rate)


def _film_length(name: str, path: str, limits: Limits, room: int) -> int:
    """The number of a film's frames, checked before they are decoded: a few kilobytes can hold gigabytes of one colour.

    What a film says may still be a lie; `read_video` leaves it at the first frame that is not as it says.
    """
    with av.open(path) as film:
        stream = next(iter(film.streams.video), None)
        if stream is None or stream.codec_context is None:
            raise BadRequest(f"{name} has no video that can be decoded")
        packets = (packet for packet in film.demux(stream) if packet.size)  # one for each frame
        num_frames = sum(1 for _ in itertools.islice(packets, limits.frames + 1))
        shape = [num_frames, 3, stream.height, stream.width]
        _check_size(name, shape, limits)
        if math.prod(shape) > room:
            raise BadRequest(
                f"the films of a request may have {limits.body} bytes when decoded, {name} has {math.prod(shape)}",
                is_too_large=True,
            )
        return num_frames
