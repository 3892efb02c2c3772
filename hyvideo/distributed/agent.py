"""torchrun's agent, which starts the processes of a run on a node, with other rules for shutdown
and restart.

- On SIGTERM, SIGHUP or Ctrl-C it sends SIGUSR1 to its processes, which have ``--shutdown-timeout``
  to save and exit. A second signal ends them with SIGTERM. With nohup, it ignores SIGHUP.
- If a process fails, on this or another node, it ends the others with SIGTERM, which they do not
  handle.
- A run is not restarted after an exit code of ``post_train.py`` in `FINAL_CODES`, because it would
  fail again.
- ``--max-restarts`` counts the failures since the run last reached a new iteration.
- A node announces the address by which it reaches the rendezvous, where torchrun announces its host
  name.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import api

from hyvideo.distributed.node_address import node_address

KILL_AFTER_S = 3
STOPPED_CODE = 75
FINAL_CODES = (2, 3, STOPPED_CODE)  # invalid settings, reward hacking, stopped by a signal


class Agent(LocalElasticAgent):
    """Agent of one node.

    ``last_iteration`` returns the last iteration that the run has finished.
    """

    def __init__(self, *arguments, last_iteration: Callable[[], int], **options):
        super().__init__(*arguments, **options)
        self._last_iteration = last_iteration
        self._reached = 0
        self._allowed = self._remaining_restarts

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and self._allowed:
            if final_code(result.failures):
                self._remaining_restarts = 0
            elif (iteration := self._last_iteration()) > self._reached:
                self._reached = iteration
                # A restart is numbered max_restarts - _remaining_restarts, which must not repeat.
                worker_group.spec.max_restarts += self._allowed - self._remaining_restarts
                self._remaining_restarts = self._allowed
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if not isinstance(sys.exception(), SignalException):
            # a stopped process ignores SIGTERM
            return super()._shutdown(signal.SIGTERM, min(timeout, KILL_AFTER_S))
        try:
            super()._shutdown(signal.SIGUSR1, timeout)
        except SignalException:  # a second signal
            super()._shutdown(signal.SIGTERM, timeout)


def final_code(failures: dict) -> int | None:
    """Return the first of `FINAL_CODES` among the exit codes of failed processes, or None."""
    codes = {failure.exitcode for failure in failures.values()}
    return next((code for code in FINAL_CODES if code in codes), None)


def reachable(arguments: list[str]) -> list[str]:
    """Return torchrun's arguments with the address by which other nodes reach this one, unless one
    is given.

    Also sets the interface of gloo's connections, unless the user did. On the master, the endpoint
    becomes localhost, because torchrun does not recognize an address of this machine that its host
    name is not mapped to.
    """
    options = run.parse_args(arguments)
    if (
        options.rdzv_backend != "c10d"
        or not options.rdzv_endpoint
        or options.standalone
        or options.local_addr
    ):
        return arguments
    host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, default_port=29400)
    here = node_address(host)
    if here is None:  # torchrun waits for the name and then reports it
        return arguments
    if here.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", here.interface)
    added = [f"--local-addr={here.address}"]
    if here.is_master:
        added.append(f"--rdzv-endpoint=localhost:{port}")
    script = len(arguments) - len(options.training_script_args) - 1
    return [*arguments[:script], *added, *arguments[script:]]


def main(arguments: list[str], last_iteration: Callable[[list[str]], int]) -> int:
    """Run torchrun.

    Return a code of `FINAL_CODES`, else 0 or 1; ``last_iteration`` takes the flags of a run.
    """
    # Slurm sends SIGUSR1 to all processes, but the agent acts on SIGTERM. The workers would inherit
    # SIG_IGN.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    # A store that survives a restart keeps entries of the previous processes, which make the new
    # ones hang.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    arguments = reachable(arguments)
    options = run.parse_args(arguments)
    # torchrun would handle it also with nohup
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        handled = [
            name for name in options.signals_to_handle.split(",") if name.strip() != "SIGHUP"
        ]
        arguments = [f"--signals-to-handle={','.join(handled)}", *arguments]
    if options.nproc_per_node != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its warning
    flags = options.training_script_args
    # when a process fails; a stopped process ignores SIGTERM
    PContext.close.__defaults__ = (None, KILL_AFTER_S)
    api.LocalElasticAgent = functools.partial(Agent, last_iteration=lambda: last_iteration(flags))
    try:
        run.main(arguments)
    except ChildFailedError as error:
        if code := final_code(error.failures):  # the processes have reported the reason
            return code
        print(error, file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"{error}; all processes have exited", file=sys.stderr)
        return STOPPED_CODE
    return 0
