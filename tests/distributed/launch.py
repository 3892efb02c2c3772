"""Launcher of a test function on several gloo processes, with the environment variables of
torchrun.
"""

import importlib
import json
import os
import subprocess
import sys
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed import TCPStore

from hyvideo.distributed import mesh as ranks
from hyvideo.settings import processes
from tests.forked import ROOT, python

TARGET = "tests.distributed.launch"
GRACE = 2.0  # seconds for the other ranks to report after one has failed


def launch(target: str, num_processes: int, *arguments, timeout: float = 240) -> list:
    """Return the results of ``module:function`` by rank; ``arguments`` and results are JSON.

    If a process fails, the test fails with the errors of all processes.
    """
    with TemporaryDirectory() as folder:
        ends = start(
            num_processes, "-m", TARGET, target, json.dumps(arguments), folder, timeout=timeout
        )
        errors = "\n".join(
            f"rank {rank}: {end.exception()}" for rank, end in enumerate(ends) if end.exception()
        )
        assert not errors, errors
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(num_processes)]


def start(num_processes: int, *arguments, timeout: float = 240) -> list[Future]:
    """Run a Python program on each rank, until one fails.

    Return futures of stdout or `RankFailed`, by rank.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": num_processes, "MASTER_ADDR": "localhost", "MASTER_PORT": store.port}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    common |= {"OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
    running = []
    for rank in range(num_processes):
        variables = {
            name: str(value)
            for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [python(), *map(str, arguments)]
        running.append(subprocess.Popen(command, env=os.environ | variables, cwd=ROOT, **pipes))
    with ThreadPoolExecutor(num_processes) as pool:
        ends = [pool.submit(_end, process, timeout) for process in running]
        wait(ends, return_when=FIRST_EXCEPTION)
        wait(ends, GRACE)
        for process in running:
            process.kill()
    return ends


class RankFailed(Exception):
    """Exit code of a rank and the end of its stderr."""


def _end(process: subprocess.Popen, timeout: float) -> str:
    """Return the stdout of a process. Raises RankFailed if it fails or exceeds the timeout."""
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as late:
        raise RankFailed(
            f"still running after {timeout} s\n{(late.stderr or b'')[-5000:].decode()}"
        ) from late
    if process.returncode:
        raise RankFailed(process.returncode, error[-5000:])
    return out


def main(target: str, arguments: str, folder: str) -> None:
    torch.set_num_threads(1)
    module, _, function = target.partition(":")
    result = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    (Path(folder) / str(processes.rank())).write_text(json.dumps(result))
    ranks.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
