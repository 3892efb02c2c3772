"""What a rank finds on its node before a run: what must be equal on all ranks, its device, its room, its problems."""

import hashlib
import os
import platform
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from hyvideo.data.outside import unwritable
from hyvideo.distributed import checkpoint
from hyvideo.models.download_check.integrity import size_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "diffusers", "transformers")
ABSENT = "absent"


@dataclass(frozen=True)
class NodeExpectations:
    """What a run asks of every node."""

    settings: Mapping[str, object]  # by flag
    files: Mapping[str, str]  # paths, by the flag that names them: a prompt more would give a rank other prompts
    transformer_folder: Path
    output_dir: Path
    resume_from: str  # `latest`, `auto`, a checkpoint folder; empty for a new run


@dataclass(frozen=True)
class NodeReport:
    """A rank's findings, as JSON can hold them; sizes in bytes."""

    rank: int
    host: str
    compared: dict[str, str]  # value or hash of what must be the same on all ranks, by its name
    device: str
    device_id: str = ""  # of a GPU, the same in every process that sees it
    device_memory: int = 0
    transformer_bytes: int = 0
    free_host_memory: int = 0
    free_disk: int = 0
    problems: list[str] = field(default_factory=list)


def inspect_node(expected: NodeExpectations, rank: int, device: torch.device, problem: str = "") -> NodeReport:
    """The report of this rank; a ``problem`` of the caller stands first."""
    folder, output_dir = expected.transformer_folder, expected.output_dir
    size = size_of(folder) if folder.is_dir() else 0
    problems = [problem]
    if not folder.is_dir():
        problems.append(f"the transformer's folder {folder} is not there; see checkpoints-download.md")
    if reason := write_problem(output_dir, rank):
        problems.append(f"output_dir {str(output_dir)!r} cannot be written to: {reason}")
    resumed = None
    try:
        resumed = checkpoint.find(output_dir, expected.resume_from) if expected.resume_from else None
    except (ValueError, OSError) as error:
        problems.append(str(error))
    gpu, device_problem = describe_device(device)
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
    return NodeReport(
        rank=rank,
        host=socket.gethostname(),
        compared=compared,
        transformer_bytes=size,
        free_host_memory=free_host_memory(),
        free_disk=shutil.disk_usage(_nearest_existing(output_dir)).free,
        problems=[problem for problem in (*problems, device_problem) if problem],
        **gpu,
    )


def describe_device(device: torch.device) -> tuple[dict[str, str | int], str]:
    """The fields of a device in a report, and what is wrong with it."""
    if device.type != "cuda":
        return {"device": device.type}, ""
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        problem = f"LOCAL_RANK {device.index} has no GPU, as torch sees {count} here; start at most {count} processes"
        return {"device": "none"}, problem
    gpu = torch.cuda.get_device_properties(device)
    return {"device": gpu.name, "device_id": str(gpu.uuid), "device_memory": gpu.total_memory}, ""


def code_hash(root: Path) -> str:
    """Hash of the Python files that a run can import: names and contents."""
    files = sorted([*root.glob("*.py"), *(root / "hyvideo").rglob("*.py"), *(root / "scripts").rglob("*.py")])
    return _short_hash(part for file in files for part in (str(file.relative_to(root)).encode(), file.read_bytes()))


def file_hash(path: Path) -> str:
    return _short_hash([path.read_bytes()]) if path.is_file() else ABSENT


def _short_hash(parts: Iterable[bytes]) -> str:
    """Hash of parts and of where they end."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}\0".encode())
        digest.update(part)
    return digest.hexdigest()[:12]


def write_problem(folder: Path, rank: int) -> str | None:
    """Why no file can be made in a folder, or None. Tries it where the folder is there, and makes none."""
    problem = unwritable(folder)
    if problem or not folder.is_dir():
        return problem
    probe = folder / f".preflight-{socket.gethostname()}-{rank}"
    try:
        probe.write_text("written and removed by preflight\n")
        probe.unlink()
    except OSError as error:
        return f"{error.strerror} ({probe})"
    return None


def _nearest_existing(path: Path) -> Path:
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.exists(parent))


def free_host_memory() -> int:
    """Bytes that Linux could give to new processes, 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split(":", 1) for line in lines)
    return int(sizes.get("MemAvailable", "0 kB").split()[0]) * 1024
