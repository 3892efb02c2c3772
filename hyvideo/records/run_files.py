"""What a run leaves besides metrics and checkpoints: settings, videos with their scores, stage times."""

import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch
import yaml
from torch import Tensor

from hyvideo.config.settings import Config
from hyvideo.data.videos import write_video
from hyvideo.models.reward_models.rewards import Reward

ENVIRONMENT_PACKAGES = ("torch", "diffusers", "transformers", "numpy")


class StageTimer:
    """Seconds spent in each stage of an iteration, as ``time/<stage>``.

    Args:
        on_stage: Is told ``<stage>`` where it begins, and ``after <stage>`` where it ends.
    """

    def __init__(self, device: torch.device, on_stage: Callable[[str], None] = lambda stage: None):
        self.device, self.on_stage = device, on_stage
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        self.on_stage(stage)
        yield
        if self.device.type == "cuda":
            # This stream, not the device: rewards are computed beside it.
            torch.cuda.current_stream(self.device).synchronize()
        name = f"time/{stage}"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.on_stage(f"after {stage}")

    def metrics(self) -> dict[str, float]:
        return self.seconds | {"time/iteration": time.perf_counter() - self._start}


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory so far: of the GPU where there is one, else of the process. GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def write_config(output_dir: Path, config: Config, device: torch.device, world_size: int) -> None:
    """Writes config.yaml: all settings, and under ``environment`` what they ran on. ``--config`` reads it back."""
    environment = {name: metadata.version(name) for name in ENVIRONMENT_PACKAGES} | {
        "python": platform.python_version(),
        "revision": _revision(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "processes": world_size,
        "threads": torch.get_num_threads(),
    }
    settings = {name: value for name, value in config.flat().items() if value is not None}
    write_text(output_dir / "config.yaml", yaml.safe_dump(settings | {"environment": environment}, sort_keys=False))


def score_entry(
    prompt: str, seed: int, group: int, reward: Reward, *, file: str | None, advantage: float, number: int
) -> dict:
    """One object of scores.json; ``number`` is the video's among all. A number that is not there is null."""
    scores = dict.fromkeys(("VQ", "MQ", "TA")) | {name: _or_none(value) for name, value in reward.scores.items()}
    return {
        "number": number,
        "prompt": prompt,
        "seed": seed,
        "group": group,
        "file": file,
        "reward": _or_none(reward.total),
        **scores,
        "Overall": _or_none(reward.overall),
        "advantage": _or_none(advantage),
        "missing": reward.is_missing,
        "reason": reward.reason,
    }


def write_videos(folder: Path, videos: dict[int, Tensor], fps: float) -> dict[int, str]:
    """Writes clips as 000.mp4, 001.mp4, ... by their number, and gives the file names by number."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {number: f"{number:03d}.mp4" for number in videos}
    for number, video in videos.items():
        write_video(folder / names[number], video, fps)
    return names


@contextmanager
def told_if_unwritable(what: str) -> Iterator[None]:
    """Of records that training can do without: a full disk is told, and is no end."""
    try:
        yield
    except OSError as error:
        print(f"\n{what} NOT WRITTEN ({error}); training goes on", file=sys.stderr, flush=True)


def write_json(path: Path, content: list | dict) -> None:
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes aside and renames, so that the file is complete or absent."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def evenly_spaced(count: int, total: int) -> list[int]:
    """``count`` of the numbers below ``total``, spread over them; all of them if there are fewer."""
    if count >= total:
        return list(range(total))
    return [i * total // count for i in range(count)]


def _or_none(value: float) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _revision() -> str:
    """Commit of the code, with ``+`` where files were changed; ``unknown`` outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
