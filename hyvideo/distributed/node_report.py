"""What a rank finds on its node before a run: code, versions, settings, files, device, room."""

import hashlib
import json
import os
import platform
import shutil
import socket
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from hyvideo.config.settings import Config
from hyvideo.distributed import checkpoint
from hyvideo.models.download_check.integrity import size_of
from hyvideo.models.loading import find_transformer

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "diffusers", "transformers")
ABSENT = "absent"


@dataclass(frozen=True)
class NodeFacts:
    """As JSON can hold it; sizes in bytes."""

    rank: int
    host: str
    code: str  # hash of the project's Python files
    versions: dict[str, str]
    settings: dict[str, str | int | float | bool | list | None]
    inputs: dict[str, str]  # setting that names a file -> hash of the file
    transformer: str
    transformer_bytes: int
    resumed: str  # name of the checkpoint to go on from
    device_type: str
    device: str
    device_id: str = ""  # of a GPU, the same in every process that sees it
    device_memory: int = 0
    free_host_memory: int = 0
    free_disk: int = 0
    problems: list[str] = field(default_factory=list)


def collect(config: Config, rank: int, device: torch.device, problem: str = "") -> NodeFacts:
    """The facts of this rank. Adds ``problem`` to what it finds wrong itself."""
    output_dir = Path(config.record.output_dir)
    folder = transformer_folder(config)
    size = size_of(folder) if folder.is_dir() else 0
    problems = [problem] if problem else []
    if not folder.is_dir():
        problems.append(f"the transformer's folder {folder} is not there; see checkpoints-download.md")
    if reason := why_unwritable(output_dir, rank):
        problems.append(f"output_dir {str(output_dir)!r} cannot be written to: {reason}")
    try:
        wanted = config.record.resume_from_checkpoint
        found = checkpoint.find(output_dir, wanted) if wanted else None
    except (ValueError, OSError) as error:
        found = None
        problems.append(str(error))
    gpu, reason = describe_device(device)
    return NodeFacts(
        rank=rank,
        host=socket.gethostname(),
        code=code_hash(ROOT),
        versions={"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES},
        settings=json.loads(json.dumps(config.flat())),
        inputs=input_hashes(config),
        transformer=f"{size} bytes" if size else ABSENT,
        transformer_bytes=size,
        resumed=found.name if found else "none",
        device_type=device.type,
        free_host_memory=free_host_memory(),
        free_disk=free_disk(output_dir),
        problems=problems + ([reason] if reason else []),
        **gpu,
    )


def transformer_folder(config: Config) -> Path:
    """Where the weights lie in the original layout, the diffusers layout, or a transformer's own folder."""
    root = Path(config.model.pretrained_model_root)
    version = config.model.transformer_version
    return find_transformer(root, version) or root / "transformer" / version


def describe_device(device: torch.device) -> tuple[dict[str, str | int], str]:
    """The fields of a device, and what is wrong with it."""
    if device.type != "cuda":
        return {"device": device.type}, ""
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        reason = f"LOCAL_RANK {device.index} has no GPU, as torch sees {count} here; start at most {count} processes"
        return {"device": "none"}, reason
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "device_id": str(properties.uuid),
        "device_memory": properties.total_memory,
    }, ""


def code_hash(root: Path) -> str:
    """Of the Python files that a run can import: names and contents."""
    files = sorted([*root.glob("*.py"), *(root / "hyvideo").rglob("*.py"), *(root / "scripts").rglob("*.py")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def input_hashes(config: Config) -> dict[str, str]:
    """Of the small files that settings name: a prompt more on one node would give its ranks other prompts."""
    named = {
        "prompts_csv": config.data.prompts_csv,
        "valid_video_csv": config.data.valid_video_csv,
        "reward_config": config.reward.reward_config,
    }
    paths = {name: Path(path) for name, path in named.items() if path}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ABSENT
        for name, path in paths.items()
    }


def why_unwritable(folder: Path, rank: int) -> str:
    """Why no file can be made there, or an empty text. Leaves nothing, and makes no folder."""
    existing = nearest_existing(folder)
    if not existing.is_dir():
        return f"{existing} is not a folder"
    if existing != folder:
        return "" if os.access(existing, os.W_OK | os.X_OK) else f"no permission to write in {existing}"
    probe = folder / f".preflight-{socket.gethostname()}-{rank}"
    try:
        probe.write_text("written and removed by preflight\n")
        probe.unlink()
    except OSError as error:
        return f"{error.strerror} ({probe})"
    return ""


def nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def free_disk(folder: Path) -> int:
    return shutil.disk_usage(nearest_existing(folder)).free


def free_host_memory() -> int:
    """What Linux could give to new processes, 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split(":", 1) for line in lines)
    return int(sizes.get("MemAvailable", "0 kB").split()[0]) * 1024
