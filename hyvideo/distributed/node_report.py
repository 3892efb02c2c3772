"""What a rank finds on its node before a run: what must be equal on all ranks, its device, its room, its problems."""

import hashlib
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from hyvideo.data.outside import free_disk, unwritable
from hyvideo.distributed import checkpoint
from hyvideo.models.download_check.integrity import size_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "diffusers", "transformers")
GIB = 2**30
ABSENT = "absent"


@dataclass(frozen=True)
class NodeExpectations:
    """Requirements of a run on every node."""

    settings: Mapping[str, object]  # by flag
    files: Mapping[str, str]  # paths, by the flag that names them: a prompt more would give a rank other prompts
    transformer_folder: Path
    output_dir: Path
    resume_from: str  # `latest`, `auto`, a checkpoint folder; empty for a new run


@dataclass(frozen=True)
class NodeReport:
    """A rank's findings."""

    rank: int
    host: str
    device: str  # with its memory
    gpu_id: str  # the same in every process that sees it; empty without a GPU
    compared: dict[str, str]  # value or hash of what must be the same on all ranks, by its name
    free_disk: int  # bytes
    problems: list[str]


def inspect_node(expected: NodeExpectations, rank: int, device: torch.device, problem: str = "") -> NodeReport:
    """The report of this rank; a ``problem`` of the caller stands first."""
    problems = [problem] if problem else []
    size = size_of(expected.transformer_folder)
    if not size:
        problems.append(
            f"the transformer's folder {expected.transformer_folder} is not there; see checkpoints-download.md"
        )
    if reason := unwritable(expected.output_dir):
        problems.append(f"output_dir {str(expected.output_dir)!r} cannot be written to: {reason}")
    resumed = None
    try:
        resumed = checkpoint.find(expected.output_dir, expected.resume_from) if expected.resume_from else None
    except (ValueError, OSError) as error:
        problems.append(str(error))
    compared = {
        "the project's Python code": code_hash(ROOT),
        "the kind of device": device.type,
        "the transformer's files": f"{size} bytes" if size else ABSENT,
        "the checkpoint to resume": resumed.name if resumed else "none",
        "the version of python": platform.python_version(),
        **{f"the version of {name}": metadata.version(name) for name in PACKAGES},
        **{f"the file of {name}": file_hash(Path(path)) for name, path in expected.files.items()},
        **{f"the setting {name}": repr(value) for name, value in expected.settings.items()},
    }
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return NodeReport(
        rank=rank,
        host=socket.gethostname(),
        device=f"{gpu.name} with {gpu.total_memory / GIB:.0f} GiB" if gpu else device.type,
        gpu_id=str(gpu.uuid) if gpu else "",
        compared=compared,
        free_disk=free_disk(expected.output_dir),
        problems=problems,
    )


def code_hash(root: Path) -> str:
    """Hash of the Python files that a run can import: names and contents."""
    files = sorted([*root.glob("*.py"), *(root / "hyvideo").rglob("*.py"), *(root / "scripts").rglob("*.py")])
    lines = [f"{file.relative_to(root)} {file_hash(file)}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ABSENT
