"""Files of a run other than metrics and checkpoints: settings, and videos with their scores."""

import json
import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch
import yaml
from torch import Tensor

from hyvideo.data.videos import write_video
from hyvideo.files.files import publish
from hyvideo.files.run_folder import claim
from hyvideo.rewards.rewards import Reward, overall

ENVIRONMENT_PACKAGES = ("torch", "diffusers", "transformers", "numpy")


def write_config(
    output_dir: Path, settings: Mapping[str, object], device: torch.device, world_size: int
) -> None:
    """Write config.yaml: settings by flag, and hardware and versions in ``environment``.

    ``--config`` can read it.
    """
    device_name = platform.processor() or "cpu"
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    environment = {name: metadata.version(name) for name in ENVIRONMENT_PACKAGES} | {
        "python": platform.python_version(),
        "revision": _revision(),
        "command": shlex.join(sys.argv),
        "device": device_name,
        "processes": world_size,
        "threads": torch.get_num_threads(),
    }
    content = {name: value for name, value in settings.items() if value is not None} | {
        "environment": environment
    }
    write_text(
        output_dir / "config.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    )


def score_entry(
    prompt: str,
    seed: int,
    group: int,
    reward: Reward,
    *,
    file: str | None,
    advantage: float,
    number: int,
) -> dict:
    """Return an entry of scores.json; ``number`` is the index of the video.

    Values that are not finite become null.
    """
    return {
        "number": number,
        "prompt": prompt,
        "seed": seed,
        "group": group,
        "file": file,
        "reward": or_none(reward.total),
        **{
            name: or_none(value)
            for name, value in (reward.scores | overall(reward.scores, "Overall")).items()
        },
        "advantage": or_none(advantage),
        "missing": reward.is_missing,
        "reason": reward.reason,
    }


def write_videos(
    folder: Path, videos: dict[int, Tensor], fps: float, *, run: str = ""
) -> dict[int, str]:
    """Write videos as 000.mp4, 001.mp4, ... and return the file names by number.

    ``run`` marks the folder (`data.run_folder.claim`). Raises FileExistsError if something else has
    its name.
    """
    claim(folder, run)
    names = {number: f"{number:03d}.mp4" for number in videos}
    for number, video in videos.items():
        write_video(folder / names[number], video, fps)
    return names


def write_json(path: Path, content: list | dict) -> None:
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with publish(path) as aside:
        aside.write_text(text, encoding="utf-8")


def evenly_spaced(count: int, total: int) -> list[int]:
    """Return ``count`` evenly spaced integers below ``total``, or all of them if there are
    fewer.
    """
    count = min(count, total)
    return [i * total // count for i in range(count)]


def or_none(value: float) -> float | None:
    """Return the value, or None if it is NaN, inf or not a number, as JSON requires."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _revision() -> str:
    """Return the git commit, with ``+`` if files were changed, or ``unknown`` outside a
    checkout.
    """
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty=+",
        "--exclude=*",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
