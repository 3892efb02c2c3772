"""Process that trains cases with the source in its working directory: ``python worker.py JOBS``.

JOBS is a file with a JSON list of `Job`. The process imports the modules of hyvideo once and forks
for each run, so that a run starts in a second. Prints the number of each job and whether all of its
runs ended well.
"""

import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import TypedDict

TIMEOUT = 300  # seconds of a run


class Job(TypedDict):
    ranks: int
    runs: list[list[str]]  # command lines of post_train.py, one after the other
    log: str  # output of all ranks


def import_all() -> None:
    import hyvideo

    for module in pkgutil.walk_packages(hyvideo.__path__, "hyvideo."):
        try:
            importlib.import_module(module.name)
        except ImportError:  # needs a package that is not installed
            pass
    for late in ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"):
        importlib.import_module(late)


def fork(call) -> int:
    """Return the process in which ``call`` runs; its result is the exit code."""
    process = os.fork()
    if process == 0:
        sys.exit(call())
    return process


def train(job: Job, command: list[str]) -> bool:
    """Run post_train.py on each rank; return whether all ranks ended well."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [fork(lambda rank=rank: run(job, command, rank, port)) for rank in range(job["ranks"])]
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    return all(code in (0, 3) for code in codes)  # 3: tiny runs may look like reward hacking


def run(job: Job, command: list[str], rank: int, port: int) -> None:
    signal.alarm(TIMEOUT)  # ends a rank that waits for another
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if job["ranks"] > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"]}
        place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
    sys.argv = ["post_train.py", *command]
    runpy.run_path("post_train.py", run_name="__main__")


def main(jobs: str, parallel: str) -> None:
    sys.path[0] = os.getcwd()
    import_all()
    running: dict[int, int] = {}
    for number, job in enumerate(json.loads(Path(jobs).read_text())):
        if len(running) == int(parallel):
            report(running)
        process = fork(lambda job=job: not all(train(job, command) for command in job["runs"]))
        running[process] = number
    while running:
        report(running)


def report(running: dict[int, int]) -> None:
    """Wait until a job has ended, and print it."""
    process, status = os.wait()
    print(running.pop(process), status == 0, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
