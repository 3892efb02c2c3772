"""Number of processes and rank of this one, as set by torchrun, and how a process ends. Imports no torch."""

import ctypes
import os
import signal
import sys
import threading
import time

STOPPED_CODE = 75  # EX_TEMPFAIL: stopped by a signal; the same command resumes the run
CHECKPOINT_THREAD = "checkpoint"  # start of the names of the threads of `CheckpointWriter`
_GRACE_S = 5.0  # for other threads, at the end of the process


def world_size() -> int:
    """Return the number of processes started by torchrun, 1 without it. Needs no process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the rank of this process, 0 without torchrun. Needs no process group."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def use_expandable_segments() -> None:
    """Let torch's GPU allocator extend its segments, unless the user configured it. Call before torch is imported."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def wait_for_rank_0() -> None:
    """Delay all ranks except rank 0, so that a common error prints once: torchrun ends them when rank 0 exits."""
    time.sleep(2.0 * ((rank() > 0) + (local_rank() > 0)))


def stop_signals() -> set[signal.Signals]:
    """Return the signals that stop a run. Under torchrun, SIGTERM ends it at once: another rank may have failed."""
    return {signal.SIGUSR1, signal.SIGINT} | (set() if "TORCHELASTIC_RUN_ID" in os.environ else {signal.SIGTERM})


def exit_on_signals() -> None:
    """Exit with code 75 on a stop signal, before and after training; a lost launcher also sends a rank SIGUSR1."""
    for number in stop_signals():
        signal.signal(number, _exit_stopped)
    if signal.SIGTERM not in stop_signals() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGUSR1)  # PR_SET_PDEATHSIG


def _exit_stopped(number: int, _frame) -> None:
    name = signal.Signals(number).name
    os.write(2, f"\nstopped by {name} outside of training; resume with --resume_from_checkpoint latest\n".encode())
    os._exit(STOPPED_CODE)


def end_soon(code: int) -> int:
    """Return the exit code, and exit with it in a few seconds even if a thread, such as a hanging scorer's, runs on.

    Only the writing of a checkpoint, by the threads named `CHECKPOINT_THREAD`, is waited for.
    """

    def end() -> None:
        for thread in threading.enumerate():
            if thread.name.startswith(CHECKPOINT_THREAD):
                thread.join()
        os._exit(code)

    sys.stdout.flush()
    timer = threading.Timer(_GRACE_S, end)
    timer.daemon = True
    timer.start()
    return code
