"""The agent of torchrun that starts a run's processes on a node, with the ends that a run needs.

- Asked to leave, by SIGTERM or Ctrl-C, it sends SIGUSR1: its processes have ``--shutdown-timeout`` to save and leave.
  Asked twice, it ends them.
- Where one of them has failed, here or on another node, it ends the others by SIGTERM, which they do not handle.
- What would fail again is not started again: `FINAL` exit codes of ``post_train.py``.
- ``--max-restarts`` counts failures since the run last got further than ever before.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable

from torch.distributed import run
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

LEFT = 75
FINAL = (2, 3, LEFT)  # refused, reward hacking, asked to leave


class Agent(LocalElasticAgent):
    """The agent of one node; ``finished`` gives the last iteration that the run has finished."""

    def __init__(self, *arguments, finished: Callable[[], int], **options):
        super().__init__(*arguments, **options)
        self._finished, self._furthest, self._allowed = finished, 0, self._remaining_restarts

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and self._allowed:
            if final_code(result.failures):
                self._remaining_restarts = 0
            elif (finished := self._finished()) > self._furthest:
                self._furthest = finished
                # The sum grows, as restarts are numbered by it.
                worker_group.spec.max_restarts += self._allowed - self._remaining_restarts
                self._remaining_restarts = self._allowed
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if not isinstance(sys.exception(), SignalException):
            return super()._shutdown(signal.SIGTERM, timeout)
        try:
            super()._shutdown(signal.SIGUSR1, timeout)
        except SignalException:  # a second one
            super()._shutdown(signal.SIGTERM, timeout)


def final_code(failures: dict) -> int | None:
    """The exit code, of processes that failed together, for which they are not started again; None if there is none."""
    codes = {failure.exitcode for failure in failures.values()}
    return next((code for code in FINAL if code in codes), None)


def main(arguments: list[str], finished: Callable[[list[str]], int]) -> int:
    """Runs torchrun with these arguments; gives the final code of the processes, 75 after a signal, else 0 or 1.

    ``finished`` gives the last finished iteration of a run with these flags.
    """
    # Slurm sends it to all processes, and who started this one tells it by SIGTERM. Ignored, it would be so in theirs.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    # In a store that outlives a restart the words of the dead stay, and the new processes hang.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    flags = run.parse_args(arguments).training_script_args
    api.LocalElasticAgent = functools.partial(Agent, finished=lambda: finished(flags))
    try:
        run.main(arguments)
    except ChildFailedError as error:
        if code := final_code(error.failures):  # they have said why
            return code
        print(error, file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"{error}; its processes have ended", file=sys.stderr)
        return LEFT
    return 0
