"""Would this run start everywhere? What each rank finds on its node, compared before any weights are read."""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyvideo.data.outside import align_columns
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.node_report import ABSENT, GIB, NodeReport, inspect_node
from hyvideo.distributed.rank_agreement import agree, name_ranks, open_store


def preflight(
    settings: Mapping[str, Any],  # this and the next as of `inspect_node`
    files: Mapping[str, list[Path]],
    mesh: Mesh,
    device: torch.device,
    *,
    timeout_s: float = 60.0,  # for which it waits for a rank; five times that for the first all-reduce
    problem: str = "",
) -> None:
    """Raises ValueError on every rank where the ranks' nodes do not fit the run or each other; the main rank says why.

    Prints a table of the nodes from the main rank. Joins the process group if that was not done: called before
    ``mesh.start``, it names a rank that would let it wait. Reports the caller's ``problem`` with the rest.
    """
    try:
        store = open_store(mesh, timeout_s=timeout_s)
        report = inspect_node(settings, files, mesh.rank, device, problem)
        agree(store, mesh, "checks of the node", asdict(report), judge, timeout_s)
        if mesh.world_size > 1:
            most = settings["collective_timeout"]
            limit = min(most, 5 * timeout_s)  # the first collective sets all connections up
            failure = try_all_reduce(mesh, device, limit, collective_timeout=most)
            outcome = asdict(replace(report, problems=[failure] if failure else []))
            agree(store, mesh, "all-reduce", outcome, lambda sent: problems_of([NodeReport(**r) for r in sent]), limit)
    except dist.DistError as error:
        raise ValueError(f"rank 0 did not answer within {timeout_s:g} s; see the log of its node") from error


def judge(answers: list[dict]) -> list[str]:
    """Problems that keep the ranks of these reports from one run; prints the table of the nodes."""
    reports = [NodeReport(**answer) for answer in answers]
    print(table(reports), flush=True)
    return problems_of(reports)


def problems_of(reports: list[NodeReport]) -> list[str]:
    """Problems that keep these ranks from one run, in sentences."""
    by_problem = _grouped((problem, report) for report in reports for problem in report.problems)
    by_gpu = _grouped((report.gpu_id, report) for report in reports if report.gpu_id)
    keys = dict.fromkeys(key for report in reports for key in report.compared)
    return [
        *(f"{_places(those)}: {problem}" for problem, those in by_problem.items()),
        *(
            f"{_places(users)} share one GPU; start at most one process for each GPU"
            for users in by_gpu.values()
            if len(users) > 1
        ),
        *(text for key in keys for text in difference(key, reports)),
    ]


def difference(key: str, reports: Sequence[NodeReport]) -> list[str]:
    """A sentence on which ranks have which value, none where all are equal; the value of most ranks comes first."""
    groups = _grouped((report.compared.get(key, ABSENT), report) for report in reports)
    parts = [f"{value} on {_places(groups[value])}" for value in sorted(groups, key=lambda value: -len(groups[value]))]
    return [f"{key} must be the same on all ranks, got {'; '.join(parts)}"] if len(parts) > 1 else []


def table(reports: list[NodeReport]) -> str:
    """Host, ranks, devices and free disk of each host, a line each."""
    rows = [("host", "ranks", "device", "free disk")]
    for host, local in _grouped((report.host, report) for report in reports).items():
        numbers = name_ranks(report.rank for report in local).split(" ", 1)[1]
        devices = ", ".join(f"{count} x {name}" for name, count in Counter(r.device for r in local).items())
        rows.append((host, numbers, devices, f"{min(report.free_disk for report in local) / GIB:.0f} GiB"))
    return "\n".join(align_columns(rows))


def try_all_reduce(mesh: Mesh, device: torch.device, timeout_s: float, *, collective_timeout: float = 1800.0) -> str:
    """Joins the process group and sums up the ranks, in a thread as that may hang: empty, or what went wrong."""
    outcome = [f"did not end within {timeout_s:g} s"]

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
    if not outcome[-1]:
        return ""
    hint = "; NCCL_DEBUG=INFO shows the connections it tries" if device.type == "cuda" else ""
    return f"the all-reduce on {device.type}: {outcome[-1]}{hint}"


def _grouped(pairs: Iterable[tuple[str, NodeReport]]) -> dict[str, list[NodeReport]]:
    groups = defaultdict(list)
    for key, report in pairs:
        groups[key].append(report)
    return groups


def _places(reports: Sequence[NodeReport]) -> str:
    """Ranks and their hosts, of which at most four are named."""
    hosts = list(dict.fromkeys(report.host for report in reports))
    more = f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else ""
    return f"{name_ranks(report.rank for report in reports)} ({', '.join(hosts[:4])}{more})"
