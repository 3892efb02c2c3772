"""Ranks agree through the store alone: each sends an answer, the main rank judges them, and a silent one is named.

No process group is needed, so this works before there is one, and where a collective would hang.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from itertools import groupby

import torch.distributed as dist

from hyvideo.distributed.mesh import Mesh


def open_store(mesh: Mesh, *, timeout_s: float) -> dist.Store:
    """The store at torchrun's address, which it or the main rank serves. Raises DistError where nobody does."""
    if mesh.world_size == 1:
        return dist.HashStore()
    served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        mesh.world_size,
        is_master=mesh.is_main and not served_by_torchrun,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,  # it would wait for a silent rank, and not name it
        multi_tenant=True,  # the process group serves its own at this port
    )
    # torchrun's store outlives a restart, with what was sent before it; the main rank's does not.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if served_by_torchrun else "0"
    return dist.PrefixStore(f"agreement/{attempt}", store)


def agree(
    store: dist.Store, mesh: Mesh, stage: str, answer: dict, judge: Callable[[list[dict]], list[str]], timeout_s: float
) -> None:
    """Raises ValueError on every rank where the main rank finds problems in the answers, with them on the main rank.

    Each ``stage`` may be used once. On the main rank ``judge`` gives the problems in the answers, which are as JSON can
    say them and in the order of the ranks. Raises DistError where the main rank does not answer.
    """
    keys = [f"{stage}/{rank}" for rank in range(mesh.world_size)]
    verdict, read = f"{stage}/verdict", [f"{key}/read" for key in keys]
    store.set(keys[mesh.rank], json.dumps(answer))
    if not mesh.is_main:
        store.wait([verdict], timedelta(seconds=2 * timeout_s))  # the main rank may have come later, and waits then
        is_sound = store.get(verdict) == b"sound"
        store.set(read[mesh.rank], "yes")
        if not is_sound:
            time.sleep(2)  # torchrun ends all ranks when one has left; the main rank shall say why first
            raise ValueError(f"rank {mesh.rank} stops; rank 0 reports the reason")
        return
    with suppress(dist.DistError):
        store.wait(keys, timedelta(seconds=timeout_s))
    silent = name_ranks(rank for rank, key in enumerate(keys) if not store.check([key]))
    if silent:
        problems = [
            f"{silent} of {mesh.world_size} did not answer within {timeout_s:g} s ({stage}); see the log of that node "
            "for where it hangs"
        ]
    else:
        problems = judge([json.loads(store.get(key)) for key in keys])
    store.set(verdict, "problems" if problems else "sound")
    with suppress(dist.DistError):  # the store stays until the others have read it
        store.wait(read[1:], timedelta(seconds=5))
    if problems:
        raise ValueError("\n".join(problems))


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-7, 9``; empty for none."""
    ranks = sorted(ranks)
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}" if names else ""
