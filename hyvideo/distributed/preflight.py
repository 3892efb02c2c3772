"""Would this run start everywhere? What each rank finds on its node, compared before any weights are read."""

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import asdict

import torch
import torch.distributed as dist

from hyvideo.config.settings import Config
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.node_report import NodeFacts, collect
from hyvideo.distributed.rank_agreement import agree, name_ranks, open_store

GIB = 2**30


def preflight(config: Config, mesh: Mesh, device: torch.device, *, timeout_s: float = 60.0, problem: str = "") -> None:
    """Raises ValueError, the same on every rank, where the ranks' nodes do not fit the run or each other.

    Prints a table of the nodes from the main rank. Joins the process group if that was not done: called before
    ``mesh.start``, it names a rank that would let it wait.

    Args:
        problem: What the caller has found wrong on this rank; told with the rest.

    Raises: SilentRanks, a ValueError, where a rank does not answer within ``timeout_s``.
    """
    store = open_store(mesh, timeout_s=timeout_s) if mesh.world_size > 1 else None
    own = asdict(collect(config, mesh.rank, device, problem))

    def judge(everyone: list[dict]) -> list[str]:
        facts = [NodeFacts(**of_rank) for of_rank in everyone]
        print(table(facts), flush=True)
        for warning in warnings_of(facts):
            print(f"preflight: warning: {warning}", flush=True)
        return problems_of(facts)

    agree(store, mesh, "checks of the node", own, judge, timeout_s=timeout_s)
    if store is not None:
        ranks.join(device, timeout=config.distributed.collective_timeout)
        outcome = try_all_reduce(mesh, device, timeout_s)
        agree(
            store,
            mesh,
            "all-reduce",
            outcome,
            lambda outcomes: all_reduce_problems(outcomes, device),
            timeout_s=timeout_s,
        )


def problems_of(facts: list[NodeFacts]) -> list[str]:
    """What keeps these ranks from one run, in sentences."""
    problems = [*_own_problems(facts), *_shared_devices(facts)]
    compared: list[tuple[str, Callable[[NodeFacts], Hashable]]] = [
        ("the kind of device", lambda of: of.device_type),
        ("the transformer's files", lambda of: of.transformer),
        ("the checkpoint to resume", lambda of: of.resumed),
    ]
    for name in facts[0].versions:
        compared.append((f"the version of {name}", lambda of, name=name: of.versions.get(name, "absent")))
    for name in facts[0].inputs:
        compared.append((f"the file of {name}", lambda of, name=name: of.inputs.get(name, "absent")))
    for name in sorted(set().union(*(of.settings for of in facts))):
        compared.append((f"the setting {name}", lambda of, name=name: repr(of.settings.get(name, "absent"))))
    differences = [_difference(what, [value(of) for of in facts], facts) for what, value in compared]
    code = _difference("the project's Python code", [of.code for of in facts], facts)
    return [*problems, *filter(None, [code, *differences])]


def warnings_of(facts: list[NodeFacts]) -> list[str]:
    """What may be meant, and slows or fills a run."""
    devices = [f"{of.device} with {of.device_memory / GIB:.0f} GiB" for of in facts]
    found = [_difference("the GPU", devices, facts)]
    main = facts[0]
    if 0 < main.free_disk < main.transformer_bytes:
        found.append(
            f"output_dir on {main.host} has {main.free_disk / GIB:.1f} GiB free, less than the transformer's "
            f"{main.transformer_bytes / GIB:.1f} GiB: a checkpoint will not fit"
        )
    return [warning for warning in found if warning]


def table(facts: list[NodeFacts]) -> str:
    """Host, ranks, device, its memory, free host memory and free disk of each host, a line each."""
    rows = [("host", "ranks", "device", "memory", "free host memory", "free disk")]
    for host in dict.fromkeys(of.host for of in facts):
        own = [of for of in facts if of.host == host]
        numbers = name_ranks(of.rank for of in own).split(" ", 1)[1]
        devices = ", ".join(f"{count} x {name}" for name, count in Counter(of.device for of in own).items())
        memory = min(of.device_memory for of in own) / GIB
        rows.append(
            (
                host,
                numbers,
                devices,
                f"{memory:.0f} GiB" if memory else "-",
                f"{min(of.free_host_memory for of in own) / GIB:.0f} GiB",
                f"{min(of.free_disk for of in own) / GIB:.0f} GiB",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def try_all_reduce(mesh: Mesh, device: torch.device, timeout_s: float) -> str:
    """Empty where the ranks' numbers add up on ``device``, else what happened.

    In a thread: a collective that hangs, or the first one's setting up of connections, does not come back.
    """
    outcome: list[str] = []

    def run() -> None:
        total = torch.tensor(float(mesh.rank + 1), device=device)
        wanted = mesh.world_size * (mesh.world_size + 1) / 2
        try:
            dist.all_reduce(total)
            outcome.append("" if total.item() == wanted else f"gave {total.item():g} in place of {wanted:g}")
        except RuntimeError as error:  # as torch.distributed tells everything; goes into the message of all ranks
            outcome.append(" ".join(str(error).split())[:300])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcome[0] if outcome else f"did not end within {timeout_s:g} s"


def all_reduce_problems(outcomes: list[str], device: torch.device) -> list[str]:
    ranks_by_outcome: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        ranks_by_outcome.setdefault(outcome, []).append(rank)
    hint = "; NCCL_DEBUG=INFO shows the connections it tries" if device.type == "cuda" else ""
    return [
        f"the all-reduce on {device.type} {outcome} on {name_ranks(found)}{hint}"
        for outcome, found in ranks_by_outcome.items()
        if outcome
    ]


def _own_problems(facts: list[NodeFacts]) -> list[str]:
    """What ranks found by themselves, each sentence once with the ranks it is true for."""
    found: dict[str, list[NodeFacts]] = {}
    for of in facts:
        for problem in of.problems:
            found.setdefault(problem, []).append(of)
    return [f"{_places(those)}: {problem}" for problem, those in found.items()]


def _shared_devices(facts: list[NodeFacts]) -> list[str]:
    users: dict[str, list[NodeFacts]] = {}
    for of in facts:
        if of.device_id:
            users.setdefault(of.device_id, []).append(of)
    return [
        f"{_places(those)} have one GPU between them ({those[0].device}); start at most one process for each GPU"
        for those in users.values()
        if len(those) > 1
    ]


def _difference(what: str, values: list[Hashable], facts: list[NodeFacts]) -> str | None:
    """Which ranks have which value, where they are not all equal; the value of most ranks first."""
    if len(set(values)) == 1:
        return None
    parts = [
        f"{value} on {_places([of for of, own in zip(facts, values) if own == value])}"
        for value, _ in Counter(values).most_common()
    ]
    return f"{what} must be the same on all ranks, got {'; '.join(parts)}"


def _places(facts: list[NodeFacts]) -> str:
    hosts = list(dict.fromkeys(of.host for of in facts))
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else "")
    return f"{name_ranks(of.rank for of in facts)} ({shown})"
