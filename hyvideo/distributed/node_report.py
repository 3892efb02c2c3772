"""Report of a rank before a run: values that must be equal on all ranks, device, free disk space, and problems."""

import hashlib
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hyvideo.data.outside import free_disk, write_problem
from hyvideo.distributed import checkpoint
from hyvideo.models.loading import find_transformer
from hyvideo.models.weight_files import size_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "diffusers", "transformers")
GIB = 2**30
ABSENT = "absent"


@dataclass(frozen=True)
class NodeReport:
    rank: int
    host: str
    device: str  # name and memory
    gpu_id: str  # unique per GPU; empty without a GPU
    compared: dict[str, str]  # values and hashes that must be the same on all ranks, by name
    free_disk: int  # bytes
    problems: list[str]


def inspect_node(
    settings: Mapping[str, Any], files: Mapping[str, list[Path]], rank: int, device: torch.device
) -> NodeReport:
    """Return this rank's report; ``settings`` and ``files`` are keyed by flag."""
    problems, output_dir = [], Path(settings["output_dir"])
    root, version = Path(settings["pretrained_model_root"]), settings["transformer_version"]
    folder = find_transformer(root, version) or root / "transformer" / version
    size = size_of(folder)
    if not size:
        problems.append(f"the transformer folder {folder} does not exist; see checkpoints-download.md")
    if reason := write_problem(output_dir):
        problems.append(f"output_dir {str(output_dir)!r} cannot be written to: {reason}")
    resumed, resume_from = None, settings["resume_from_checkpoint"]
    try:
        resumed = checkpoint.find(output_dir, resume_from) if resume_from else None
    except (ValueError, OSError) as error:
        problems.append(str(error))
    compared = {
        "the project's Python code": code_hash(ROOT),
        "the kind of device": device.type,
        "the transformer's files": f"{size} bytes" if size else ABSENT,
        "the checkpoint to resume": resumed.name if resumed else "none",
        "the version of python": platform.python_version(),
        **{f"the version of {name}": metadata.version(name) for name in PACKAGES},
        **{f"the file of {name}": " ".join(map(file_hash, paths)) for name, paths in files.items()},
        **{f"the setting {name}": repr(value) for name, value in settings.items()},
    }
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return NodeReport(
        rank=rank,
        host=socket.gethostname(),
        device=f"{gpu.name} with {gpu.total_memory / GIB:.0f} GiB" if gpu else device.type,
        gpu_id=str(gpu.uuid) if gpu else "",
        compared=compared,
        free_disk=free_disk(output_dir),
        problems=problems,
    )


def code_hash(root: Path) -> str:
    """Return a hash of the names and contents of the Python files that a run can import."""
    files = sorted([*root.glob("*.py"), *(root / "hyvideo").rglob("*.py"), *(root / "scripts").rglob("*.py")])
    lines = [f"{file.relative_to(root)} {file_hash(file)}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ABSENT
