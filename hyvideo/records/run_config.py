"""config.yaml of a run: its settings, and the machine and versions it ran with."""

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch
import yaml

from hyvideo.records.run_files import write_text

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
