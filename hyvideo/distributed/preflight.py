"""Would this run start everywhere? What each rank finds on its node, compared before any weights are read."""

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TypeVar

import torch
import torch.distributed as dist

from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.node_report import ABSENT, NodeExpectations, NodeReport, inspect_node
from hyvideo.distributed.rank_agreement import agree, align_columns, name_ranks, open_store

GIB = 2**30
K, T = TypeVar("K"), TypeVar("T")


def preflight(
    expected: NodeExpectations,
    mesh: Mesh,
    device: torch.device,
    *,
    collective_timeout: float,
    timeout_s: float = 60.0,
    problem: str = "",
) -> None:
    """Raises ValueError, the same on every rank, where the ranks' nodes do not fit the run or each other.

    Prints a table of the nodes from the main rank. Joins the process group if that was not done: called before
    ``mesh.start``, it names a rank that would let it wait.

    Args:
        collective_timeout: Of the process group that it joins, in seconds.
        problem: Of the caller on this rank; reported with the rest.

    Raises: SilentRanks, a ValueError, where a rank does not answer within ``timeout_s``.
    """
    store = open_store(mesh, timeout_s=timeout_s) if mesh.world_size > 1 else None
    report = asdict(inspect_node(expected, mesh.rank, device, problem))
    agree(store, mesh, "checks of the node", report, judge_reports, timeout_s)
    if store is not None:
        outcome = try_all_reduce(mesh, device, timeout_s, collective_timeout=collective_timeout)
        agree(store, mesh, "all-reduce", [device.type, outcome], all_reduce_problems, timeout_s)


def judge_reports(gathered: list[dict]) -> list[str]:
    """What keeps these ranks from one run, in sentences; prints the table of the nodes and the warnings."""
    reports = [NodeReport(**report) for report in gathered]
    print(table(reports), flush=True)
    for warning in warnings_of(reports):
        print(f"preflight: warning: {warning}", flush=True)
    return problems_of(reports)


def problems_of(reports: list[NodeReport]) -> list[str]:
    """What keeps these ranks from one run, in sentences."""
    by_problem = _grouped((problem, report) for report in reports for problem in report.problems)
    by_gpu = _grouped((report.device_id, report) for report in reports if report.device_id)
    shared = [
        f"{_places(users)} have one GPU between them ({users[0].device}); start at most one process for each GPU"
        for users in by_gpu.values()
        if len(users) > 1
    ]
    keys = dict.fromkeys(key for report in reports for key in report.compared)
    differences = [difference(key, [report.compared.get(key, ABSENT) for report in reports], reports) for key in keys]
    single = [f"{_places(those)}: {problem}" for problem, those in by_problem.items()]
    return [*single, *shared, *filter(None, differences)]


def warnings_of(reports: list[NodeReport]) -> list[str]:
    """What may be meant, and slows or fills a run."""
    gpus = [f"{report.device} with {report.device_memory / GIB:.0f} GiB" for report in reports]
    warnings = [difference("the GPU", gpus, reports)]
    main = reports[0]
    if 0 < main.free_disk < main.transformer_bytes:
        warnings.append(
            f"output_dir on {main.host} has {main.free_disk / GIB:.1f} GiB free, less than the transformer's "
            f"{main.transformer_bytes / GIB:.1f} GiB: a checkpoint will not fit"
        )
    return [warning for warning in warnings if warning]


def difference(key: str, values: Sequence[str], reports: Sequence[NodeReport]) -> str | None:
    """Sentence on which ranks have which value, None where all are equal; the value of most ranks comes first."""
    groups = sorted(_grouped(zip(values, reports)).items(), key=lambda group: -len(group[1]))
    if len(groups) == 1:
        return None
    parts = [f"{value} on {_places(those)}" for value, those in groups]
    return f"{key} must be the same on all ranks, got {'; '.join(parts)}"


def table(reports: list[NodeReport]) -> str:
    """Host, ranks, device, its memory, free host memory and free disk of each host, a line each."""
    rows = [("host", "ranks", "device", "memory", "free host memory", "free disk")]
    for host, local in _grouped((report.host, report) for report in reports).items():
        numbers = name_ranks(report.rank for report in local).split(" ", 1)[1]
        devices = _grouped((report.device, report) for report in local)
        memory, host_memory, disk = (
            f"{min(getattr(report, name) for report in local) / GIB:.0f} GiB"
            for name in ("device_memory", "free_host_memory", "free_disk")
        )
        names = ", ".join(f"{len(those)} x {name}" for name, those in devices.items())
        rows.append((host, numbers, names, memory if min(r.device_memory for r in local) else "-", host_memory, disk))
    return "\n".join(align_columns(rows))


def try_all_reduce(mesh: Mesh, device: torch.device, timeout_s: float, *, collective_timeout: float = 1800.0) -> str:
    """Joins the process group and adds the ranks' numbers up on ``device``: empty where that works, else what happened.

    In a thread: a collective that hangs, or the first one's setting up of connections, does not come back.
    """
    outcome: list[str] = []

    def run() -> None:
        expected = mesh.world_size * (mesh.world_size + 1) / 2
        try:
            ranks.join(device, timeout=collective_timeout)
            total = torch.tensor(float(mesh.rank + 1), device=device)
            dist.all_reduce(total)
            outcome.append("" if total.item() == expected else f"gave {total.item():g} in place of {expected:g}")
        except RuntimeError as error:  # as torch.distributed raises everything; goes into the message of all ranks
            outcome.append(" ".join(str(error).split())[:300])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcome[0] if outcome else f"did not end within {timeout_s:g} s"


def all_reduce_problems(outcomes: list[tuple[str, str]]) -> list[str]:
    """What happened in the all-reduce, from the kind of device and the outcome of each rank."""
    groups = _grouped((tuple(outcome), rank) for rank, outcome in enumerate(outcomes))
    hints = {"cuda": "; NCCL_DEBUG=INFO shows the connections it tries"}
    return [
        f"the all-reduce on {kind} {outcome} on {name_ranks(numbers)}{hints.get(kind, '')}"
        for (kind, outcome), numbers in groups.items()
        if outcome
    ]


def _grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = defaultdict(list)
    for key, member in pairs:
        groups[key].append(member)
    return dict(groups)


def _places(reports: Sequence[NodeReport]) -> str:
    """Ranks and their hosts, of which at most four are named."""
    hosts = list(dict.fromkeys(report.host for report in reports))
    more = f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else ""
    return f"{name_ranks(report.rank for report in reports)} ({', '.join(hosts[:4])}{more})"
