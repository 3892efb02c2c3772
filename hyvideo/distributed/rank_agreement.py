"""Agreement of ranks through the key-value store, without a process group: the main rank checks all
ranks' answers.
"""

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import torch.distributed as dist

from hyvideo.distributed.mesh import Mesh

_SAME_ERROR_S = 5.0  # time within which all ranks meet an error that they have in common


def open_store(mesh: Mesh, *, timeout_s: float) -> dist.Store:
    """Return the store at torchrun's address, served by torchrun or the main rank.

    Raises DistError if unavailable.
    """
    if mesh.world_size == 1:
        return dist.HashStore()
    served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        mesh.world_size,
        is_master=mesh.is_main and not served_by_torchrun,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,  # this would not report which rank is missing
        multi_tenant=True,  # the process group uses the same port
    )
    # torchrun's store keeps old entries across a restart; the main rank's does not.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if served_by_torchrun else "0"
    return dist.PrefixStore(f"agreement/{attempt}", store)


def agree(
    store: dist.Store,
    mesh: Mesh,
    stage: str,
    answer: dict,
    judge: Callable[[list[dict]], list[str]],
    timeout_s: float,
) -> None:
    """Raise ValueError on every rank if the main rank finds problems; the main rank's message lists
    them.

    ``judge`` receives all ranks' answers, after a JSON round trip. Each ``stage`` may be used once.
    """
    keys = [f"{stage}/{rank}" for rank in range(mesh.world_size)]
    verdict, read = f"{stage}/verdict", [f"{key}/read" for key in keys]
    store.set(keys[mesh.rank], json.dumps(answer))
    if not mesh.is_main:
        # the main rank may start late and then wait for others
        store.wait([verdict], timedelta(seconds=2 * timeout_s))
        is_sound = store.get(verdict) == b"sound"
        store.set(read[mesh.rank], "yes")
        if not is_sound:
            # the main rank must report the reason before torchrun ends all ranks after the first
            # exit
            time.sleep(2)
            raise ValueError(f"rank {mesh.rank} stops; see the message of rank 0")
        return
    with suppress(dist.DistError):
        store.wait(keys, timedelta(seconds=timeout_s))
    silent = name_ranks(rank for rank, key in enumerate(keys) if not store.check([key]))
    if silent:
        problems = [
            f"{silent} of {mesh.world_size} did not answer within {timeout_s:g} s ({stage}); see "
            "the log of that node to find where it hangs"
        ]
    else:
        problems = judge([json.loads(store.get(key)) for key in keys])
    store.set(verdict, "problems" if problems else "sound")
    with suppress(dist.DistError):  # keep the store until the others have read it
        store.wait(read[1:], timedelta(seconds=5))
    if problems:
        raise ValueError("\n".join(problems))


def have_all_failed(error: BaseException, mesh: Mesh) -> bool:
    """Return whether all ranks have failed, so that they can still save together.

    Every rank calls it once at most.

    False if this rank's error comes from communication, after which collectives may hang.
    """
    if mesh.world_size == 1:
        return True
    raised_in = [
        Path(frame.filename).as_posix() for frame in traceback.extract_tb(error.__traceback__)[-1:]
    ]
    if isinstance(error, dist.DistError) or any(
        "/torch/distributed/" in file for file in raised_in
    ):
        return False
    with suppress(dist.DistError):  # a rank is missing, or the store
        store = open_store(mesh, timeout_s=_SAME_ERROR_S)
        store.set(f"failed/{mesh.rank}", "yes")
        store.wait(
            [f"failed/{rank}" for rank in range(mesh.world_size)], timedelta(seconds=_SAME_ERROR_S)
        )
        return True
    return False


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-7, 9``, or an empty string for no ranks."""
    ranks = sorted(ranks)
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    ]
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}" if names else ""
