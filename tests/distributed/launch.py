"""Runs a function of a test module on several gloo processes, as torchrun starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(target: str, num_processes: int, *arguments, timeout: int = 240) -> list:
    """What ``module:function`` returned on each rank, by rank; ``arguments`` and results are JSON.

    The test fails with what the processes said if one of them does.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    command = [sys.executable, *launcher, "-m", "tests.distributed.launch", target, json.dumps(arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=timeout)
    told = [line for line in result.stderr.splitlines() if line.startswith("[rank")]
    assert result.returncode == 0, "\n".join(told[-60:]) or result.stderr[-5000:]
    lines = [json.loads(line.removeprefix(MARK)) for line in result.stdout.splitlines() if line.startswith(MARK)]
    by_rank = dict(lines)
    assert len(by_rank) == num_processes, result.stdout[-2000:]
    return [by_rank[rank] for rank in range(num_processes)]


MARK = "\x02result "


def main() -> None:
    import importlib

    import torch

    from hyvideo.config import processes
    from hyvideo.distributed import mesh as ranks

    torch.set_num_threads(1)
    module, _, function = sys.argv[1].partition(":")
    result = getattr(importlib.import_module(module), function)(*json.loads(sys.argv[2]))
    # One write, so that lines of several processes do not mix.
    sys.stdout.write("\n" + MARK + json.dumps([processes.rank(), result]) + "\n")
    sys.stdout.flush()
    ranks.stop()


if __name__ == "__main__":
    main()
