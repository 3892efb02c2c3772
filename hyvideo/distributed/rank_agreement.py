"""Ranks agree through the store alone: each sends an answer, the main rank judges them, and a silent one is named.

No process group is needed, so this works before there is one, and where a collective would hang.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch.distributed as dist

from hyvideo.distributed.mesh import Mesh

_SECONDS_TO_READ = 5.0


class SilentRanks(ValueError):
    """Ranks that did not answer in time. ``ranks`` has their numbers."""

    def __init__(self, message: str, ranks: Iterable[int]):
        super().__init__(message)
        self.ranks = tuple(ranks)


def open_store(mesh: Mesh, *, timeout_s: float) -> dist.Store:
    """The store of torchrun's addresses; the main rank serves it unless torchrun does.

    Raises: SilentRanks where nobody serves it.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address,
            port,
            mesh.world_size,
            is_master=mesh.is_main and not served_by_torchrun,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # it would wait for a silent rank, and not name it
            multi_tenant=True,  # the process group serves its own at this port
        )
    except dist.DistError as error:
        raise _no_main_rank(timeout_s, f"nobody serves {address}:{port}") from error
    # torchrun's store outlives a restart, with what was sent before it; the main rank's does not.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if served_by_torchrun else "0"
    return dist.PrefixStore(f"agreement/{attempt}", store)


def agree(
    store: dist.Store | None, mesh: Mesh, stage: str, answer: Any, judge: Callable[[list], list[str]], timeout_s: float
) -> None:
    """Raises ValueError with the problems that the main rank finds in the answers of all, the same on every rank.

    Args:
        store: None with one process.
        stage: Name of this agreement; each may be used once.
        answer: Of this rank, as JSON can hold it.
        judge: Gives the problems in the answers, which come in the order of the ranks; called on the main rank.
    """
    if store is None:
        silent, problems = [], judge([answer])
    elif mesh.is_main:
        store.set(f"{stage}/{mesh.rank}", json.dumps(answer))
        silent, problems = _judgement(store, mesh, stage, judge, timeout_s)
        store.set(f"{stage}/judgement", json.dumps([silent, problems]))
        if problems:
            _wait_for_readers(store, stage, mesh.world_size - 1 - len(silent))
    else:
        try:
            store.set(f"{stage}/{mesh.rank}", json.dumps(answer))
            # The main rank may have come later, and then waits its own time.
            store.wait([f"{stage}/judgement"], timedelta(seconds=2 * timeout_s))
            silent, problems = json.loads(store.get(f"{stage}/judgement"))
            store.add(f"{stage}/read", 1)
        except dist.DistError as error:
            raise _no_main_rank(2 * timeout_s, "it judges what the ranks say") from error
    if silent:
        raise SilentRanks("\n".join(problems), silent)
    if problems:
        raise ValueError("\n".join(problems))


def _judgement(
    store: dist.Store, mesh: Mesh, stage: str, judge: Callable[[list], list[str]], timeout_s: float
) -> tuple[list[int], list[str]]:
    """Ranks that are silent, and the problems in what the others say or in their silence."""
    keys = [f"{stage}/{rank}" for rank in range(mesh.world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistError:
        if silent := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            message = (
                f"{name_ranks(silent)} of {mesh.world_size} did not answer within {timeout_s:g} s ({stage}); see the "
                "log of that node for where it hangs"
            )
            return silent, [message]
    return [], judge([json.loads(store.get(key)) for key in keys])


def _wait_for_readers(store: dist.Store, stage: str, count: int) -> None:
    """Keeps the store up until the others have read why the main rank is about to leave."""
    end = time.monotonic() + _SECONDS_TO_READ
    while store.add(f"{stage}/read", 0) < count and time.monotonic() < end:
        time.sleep(0.05)


def _no_main_rank(seconds: float, reason: str) -> SilentRanks:
    return SilentRanks(f"rank 0 did not answer within {seconds:g} s: {reason}; see the log of its node", [0])


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-7, 9``."""
    ranks = sorted(ranks)
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line of text for each row, its cells below those of the row before."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
