"""Runs of post_train.py that die in the middle: processes that a server forks, as starting Python takes seconds.

A life is the whole program, with its own exit code. A fault is planted by a function of a test module that is called
in the new process before the program begins, and patches what it likes; the product knows nothing of it.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

SLOW = (
    "diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5",
    "hyvideo.distributed.preflight",
    "hyvideo.miniature.reward",
    "hyvideo.trainer",
    "transformers.hf_argparser",
)


class Life(NamedTuple):
    code: int  # exit code; minus the signal that killed it
    told: str  # stdout and stderr


class Lives:
    """The server. Used as a context; one life at a time.

    Args:
        modules: What is imported once, before any life.
    """

    def __init__(self, *modules: str):
        self.modules = modules

    def __enter__(self) -> "Lives":
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.lives", *self.modules]
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT)
        return self

    def __exit__(self, *_) -> None:
        self._server.stdin.close()
        self._server.wait(60)

    def live(self, log: Path, settings: dict, plant: str = "", *arguments) -> Life:
        """One run of the program under the smoke settings and these; ``plant`` is ``module:function``."""
        flags = [f"--{name}={value}" for name, value in settings.items()]
        argv = ["post_train.py", "--config", "configs/smoke.yaml", *flags]
        job = {"argv": argv, "plant": plant, "arguments": arguments, "log": str(log)}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        status = json.loads(self._server.stdout.readline())
        return Life(os.waitstatus_to_exitcode(status), log.read_text())


def serve() -> int:
    import torch

    import post_train

    torch.set_num_threads(1)
    for module in (*SLOW, *sys.argv[1:]):
        importlib.import_module(module)
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if job["plant"]:
                module, _, function = job["plant"].partition(":")
                getattr(importlib.import_module(module), function)(*job["arguments"])
            sys.argv = job["argv"]
            return post_train.main()
        print(os.waitpid(pid, 0)[1], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(serve())
