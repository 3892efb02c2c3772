"""Number of processes and rank of this one, as set by torchrun, and the signals that end it.

Imports no torch.
"""

import atexit
import ctypes
import gc
import os
import platform
import signal
import sys
import time
from contextlib import suppress
from importlib.metadata import version

STOPPED_CODE = 75  # EX_TEMPFAIL: stopped by a signal; the same command resumes the run
# Exit codes after which the same command would end the same way, or must not run again by itself:
# unusable settings, reward hacking, stopped by a signal.
FINAL_CODES = (2, 3, STOPPED_CODE)
_PR_SET_PDEATHSIG = 1  # of prctl
_MAX_COMPILE_WORKERS = 32  # torch's limit
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")


def world_size() -> int:
    """Return the number of processes started by torchrun, 1 without it. Needs no process group.

    Raises ValueError in one of several tasks of another launcher, each of which would do the work
    of all.
    """
    if "WORLD_SIZE" not in os.environ:
        launcher, num_tasks = _tasks()
        if num_tasks > 1:
            raise ValueError(
                f"this is one of {num_tasks} tasks that {launcher} has started, and each would do "
                "the whole work: start one task per node, which starts torchrun (WORLD_SIZE is not "
                "set), as scripts/post_train/slurm.sbatch does, or one task in all"
            )
    return int(os.environ.get("WORLD_SIZE", "1"))


def _tasks() -> tuple[str, int]:
    """Return the launcher that is not torchrun and the number of its tasks."""
    given = os.environ.get
    if "SLURM_PROCID" in os.environ:
        # Slurm's batch script has the number of tasks of the job, and is a single process.
        is_script = given("ENVIRONMENT") == "BATCH"
        of_job = "1" if is_script else given("SLURM_NTASKS", "1")
        return "srun", int(given("SLURM_STEP_NUM_TASKS", of_job))
    return "mpirun", int(given("OMPI_COMM_WORLD_SIZE", given("PMI_SIZE", "1")))


def rank() -> int:
    """Return the rank of this process, 0 without torchrun. Needs no process group."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def prepare() -> None:
    """Set what torch reads when it is imported, and let Python end this process at once.

    At the end, Python would search every module of torch and diffusers for garbage, which takes one
    to three seconds.
    """
    configure_allocator()
    share_compile_workers()
    atexit.register(gc.freeze)


def configure_allocator() -> None:
    """Let torch's GPU allocator extend its segments, and pin host memory of exactly the size of a
    tensor, unless the user configured it.

    Call before torch is imported. WSL2's driver fails at the first allocation in an expandable
    segment. By default, torch rounds pinned tensors up to powers of two, half as much again for the
    matrices of Wan; only torch 2.13 and later can leave tensors above 1 MiB as they are.
    """
    chosen = []
    if "microsoft" not in platform.release().lower():
        chosen.append("expandable_segments:True")
    if pins_exact_sizes():
        chosen.append("pinned_max_round_threshold_mb:1")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and chosen:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", ",".join(chosen))


def pins_exact_sizes() -> bool:
    """Return whether the installed torch can pin memory without rounding its size up."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def share_compile_workers() -> None:
    """Divide the cores among the compilers of this machine's processes, unless the user set their
    number.

    By default each process starts a compiler on every core, up to 32. Call before torch is
    imported.
    """
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_processes > 1:
        workers = max(1, min(_MAX_COMPILE_WORKERS, num_cores() // num_processes))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(workers))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def may_have_gpu() -> bool:
    """Return False if torch will find no GPU on this machine, without importing it: Linux without the
    device file of a driver (NVIDIA's, WSL's, Jetson's, AMD's), or with hidden GPUs.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return sys.platform != "linux" or any(map(os.path.exists, _GPU_FILES))


def wait_for_rank_0() -> None:
    """Delay all ranks except rank 0, so that a common error prints once: torchrun ends them when
    rank 0 exits.
    """
    time.sleep(2.0 * (rank() > 0) + 2.0 * (local_rank() > 0))


def stop_signals() -> set[signal.Signals]:
    """Return the signals that stop a run.

    A closed terminal sends SIGHUP, which stays ignored if the program was started with nohup.
    """
    numbers = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.add(signal.SIGHUP)
    return numbers


def exit_on_signals() -> None:
    """Exit with code 75 on a stop signal, before and after training.

    On Linux, a rank also receives SIGUSR1 when its launcher dies, so that it saves and ends.
    """
    for number in stop_signals():
        signal.signal(number, _exit_stopped)
    if is_launched() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)


def is_launched() -> bool:
    """Return whether torchrun started this process, also as the only one."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _exit_stopped(number: int, _frame) -> None:
    # A rank also receives SIGTERM after another one has failed and has said why.
    if number != signal.SIGTERM or not is_launched():
        name = signal.Signals(number).name
        write_to_stderr(
            f"\nstopped by {name} outside of training; the same command resumes the run\n"
        )
    os._exit(STOPPED_CODE)


def write_to_stderr(text: str) -> None:
    """Write to stderr from a signal handler; without a reader, such as a closed terminal, write
    nothing.
    """
    with suppress(OSError):
        os.write(2, text.encode())
