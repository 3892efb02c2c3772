"""Preflight: checks of every node and a first all-reduce, before any weights are loaded.

Every rank reports values that must be equal on all ranks, its device, the free disk space, and
problems.
"""

import hashlib
import os
import platform
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyvideo.data.files import free_disk
from hyvideo.data.text import align_columns
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.rank_agreement import agree, name_ranks, open_store
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


def preflight(
    settings: Mapping[str, Any],  # `settings` and `files` are as for `inspect_node`
    files: Mapping[str, list[Path]],
    mesh: Mesh,
    device: torch.device,
    *,
    timeout_s: float = 60.0,  # limit for a rank's answer; five times that for the first all-reduce
) -> None:
    """Raise ValueError on every rank if the nodes do not fit the run or each other; rank 0's error
    has the reasons.

    For several ranks. Call it before ``mesh.start``, which would wait for a missing rank.
    """
    try:
        store = open_store(mesh, timeout_s=timeout_s)
        report = inspect_node(settings, files, mesh.rank, device)
        agree(store, mesh, "checks of the node", asdict(report), judge, timeout_s)
        collective_timeout = settings["collective_timeout"]
        # the first collective creates all connections
        limit = min(collective_timeout, 5 * timeout_s)
        failure = try_all_reduce(mesh, device, limit, collective_timeout=collective_timeout)
        outcome = asdict(replace(report, problems=[failure] if failure else []))
        agree(
            store,
            mesh,
            "all-reduce",
            outcome,
            lambda sent: problems_of([NodeReport(**r) for r in sent]),
            limit,
        )
    except dist.DistError as error:
        raise ValueError(
            f"rank 0 did not answer at {rank_0_address()} within {timeout_s:g} s; see the log of "
            "its node, and check that this node can connect to this address and to any port of it"
        ) from error


def inspect_node(
    settings: Mapping[str, Any], files: Mapping[str, list[Path]], rank: int, device: torch.device
) -> NodeReport:
    """Return this rank's report; ``settings`` and ``files`` are keyed by flag."""
    transformer = find_transformer(
        Path(settings["pretrained_model_root"]), settings["transformer_version"]
    )
    compared = {
        "the project's Python code": code_hash(ROOT),
        "the kind of device": device.type,
        "the transformer's files": f"{size_of(transformer)} bytes" if transformer else ABSENT,
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
        free_disk=free_disk(Path(settings["output_dir"])),
        problems=[],
    )


def code_hash(root: Path) -> str:
    """Return a hash of the names and contents of the Python files that a run can import."""
    files = sorted(
        [*root.glob("*.py"), *(root / "hyvideo").rglob("*.py"), *(root / "scripts").rglob("*.py")]
    )
    lines = [f"{file.relative_to(root)} {file_hash(file)}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ABSENT


def judge(answers: list[dict]) -> list[str]:
    """Print the table of the nodes and return the problems of the answers, which are `NodeReport`
    as dictionaries.
    """
    reports = [NodeReport(**answer) for answer in answers]
    print(table(reports), flush=True)
    return problems_of(reports)


def problems_of(reports: list[NodeReport]) -> list[str]:
    """Return the problems that prevent these ranks from training together, one message each."""
    by_problem = _grouped((problem, report) for report in reports for problem in report.problems)
    by_gpu = _grouped((report.gpu_id, report) for report in reports if report.gpu_id)
    keys = dict.fromkeys(key for report in reports for key in report.compared)
    return [
        *(f"{_locations(affected)}: {problem}" for problem, affected in by_problem.items()),
        *(
            f"{_locations(users)} share one GPU; start at most one process per GPU"
            for users in by_gpu.values()
            if len(users) > 1
        ),
        *(message for key in keys for message in difference(key, reports)),
    ]


def difference(key: str, reports: Sequence[NodeReport]) -> list[str]:
    """Return a list with one message on the ranks of each value, most frequent first; empty if all
    are equal.
    """
    groups = _grouped((report.compared.get(key, ABSENT), report) for report in reports)
    parts = [
        f"{name} on {_locations(groups[name])}"
        for name in sorted(groups, key=lambda name: -len(groups[name]))
    ]
    return (
        [f"{key} must be the same on all ranks, got {'; '.join(parts)}"] if len(parts) > 1 else []
    )


def table(reports: list[NodeReport]) -> str:
    """Return a table with host, ranks, devices and free disk, one line per host."""
    rows = [("host", "ranks", "device", "free disk")]
    for host, local in _grouped((report.host, report) for report in reports).items():
        numbers = name_ranks(report.rank for report in local).split(" ", 1)[1]
        devices = ", ".join(
            f"{count} x {name}" for name, count in Counter(r.device for r in local).items()
        )
        rows.append(
            (host, numbers, devices, f"{min(report.free_disk for report in local) / GIB:.0f} GiB")
        )
    return "\n".join(align_columns(rows))


def try_all_reduce(
    mesh: Mesh, device: torch.device, timeout_s: float, *, collective_timeout: float = 1800.0
) -> str:
    """Join the process group and all-reduce, in a thread because this may hang.

    Return the problem, or ``""``.
    """
    outcome = [f"did not finish within {timeout_s:g} s"]

    def run() -> None:
        expected = mesh.world_size * (mesh.world_size + 1) / 2
        try:
            ranks.join(device, timeout=collective_timeout)
            total = torch.tensor(float(mesh.rank + 1), device=device)
            dist.all_reduce(total)
            outcome.append(
                ""
                if total.item() == expected
                else f"returned {total.item():g} instead of {expected:g}"
            )
        except RuntimeError as error:  # the type of all torch.distributed errors
            outcome.append(" ".join(str(error).split())[:300])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome[-1]:
        return ""
    return f"the all-reduce on {device.type} failed: {outcome[-1]}{connection_hint(device)}"


def rank_0_address() -> str:
    """Return the address and port of rank 0, as torchrun sets them on all ranks."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def connection_hint(device: torch.device) -> str:
    """Return what to set if ranks cannot connect to each other."""
    if not has_several_nodes():
        return "; set NCCL_DEBUG=INFO to see the connections" if device.type == "cuda" else ""
    used = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
    hint = (
        f"; set GLOO_SOCKET_IFNAME (now {used}) to the network interface that reaches the other "
        "nodes"
    )
    if device.type == "cuda":
        hint += ", NCCL_SOCKET_IFNAME to the same, and NCCL_DEBUG=INFO to see the connections"
    return hint


def has_several_nodes() -> bool:
    """Return whether the run has processes on several nodes; False if torchrun did not say so."""
    return os.environ.get("GROUP_WORLD_SIZE", "1") != "1"


def _grouped(pairs: Iterable[tuple[str, NodeReport]]) -> dict[str, list[NodeReport]]:
    groups = defaultdict(list)
    for key, report in pairs:
        groups[key].append(report)
    return groups


def _locations(reports: Sequence[NodeReport]) -> str:
    """Return the names of ranks and of at most four of their hosts."""
    hosts = list(dict.fromkeys(report.host for report in reports))
    more = f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else ""
    return f"{name_ranks(report.rank for report in reports)} ({', '.join(hosts[:4])}{more})"
