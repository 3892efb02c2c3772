"""Soak test: a small run that is killed repeatedly equals an uninterrupted run bit for bit.

Every process is ended after a random time by kill -9 or SIGTERM. Memory and open files of the
uninterrupted run are sampled after every iteration. A longer test: ``SOAK_ITERATIONS=200``.

In a second test, one of two ranks is killed or signaled in every stage, and the run is started again
both.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5  # noqa: F401, before the timer starts

import post_train
from hyvideo.checkpoints import format, loading
from hyvideo.checkpoints import writer as checkpoint_writer
from hyvideo.checkpoints.reader import read_shapes
from hyvideo.distributed.watchdog import Watchdog
from hyvideo.miniature import reward  # noqa: F401
from hyvideo.records.metrics_file import complete_lines
from hyvideo.settings import processes
from hyvideo.trainer import Trainer
from tests.forked import python

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "valid_video_csv": "",
    "report_to": "none",
    "num_threads": 1,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_generations": 2,
    "grpo_sampling_steps": 3,
    "mini_batch_size_per_update": 2,
    "cfg_scale": 1.0,
    "learning_rate": 1e-3,
    "ema_decay": 0.9,
    "kl_strategy": "dual_moving",
    "kl_schedule": "adaptive",
    "update_ref_model_step": 6,
    "log_video_interval": 0,
    "save_interval": 2,
}
ITERATIONS = int(os.environ.get("SOAK_ITERATIONS", "8"))
MAX_SLOPE = 64.0  # KiB of memory per iteration
MIN_ITERATIONS_TO_FIT = 100  # memory grows during the first iterations
MAX_IDLE_RESTARTS = 30


def run_process(run: Path, seconds: float, number: int) -> int:
    """Start or resume a run in a process, send it a signal after ``seconds``, and return its exit
    code.
    """
    run.mkdir(exist_ok=True)
    program = "from tests.training.test_soak import train; train()"
    flags = [f"--{name}={value}" for name, value in SETTINGS.items()]
    flags += [f"--max_steps={ITERATIONS}", f"--output_dir={run / 'run'}"]
    command = [
        sys.executable,
        "-c",
        program,
        run / "samples.jsonl",
        str(seconds),
        str(int(number)),
        *flags,
    ]
    with open(run / "log", "a") as log:
        return subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=3600).returncode


def train():
    """Program of the process of `run_process`."""
    samples, seconds, number, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    Trainer.run_iteration = with_samples(Trainer.run_iteration, Path(samples))
    sys.argv = ["post_train.py", "--config", "configs/smoke.yaml", *flags]
    if float(seconds):
        timer = threading.Timer(float(seconds), os.kill, (os.getpid(), int(number)))
        timer.daemon = True
        timer.start()
    sys.exit(post_train.main())


def with_samples(run_iteration, path):
    """Return ``run_iteration`` extended to log memory, open files and seconds."""
    start = time.monotonic()

    def run(*arguments):
        metrics = run_iteration(*arguments)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE") // 1024
        with open(path, "a") as file:
            seconds = time.monotonic() - start
            print(
                json.dumps(
                    [arguments[0].iteration, memory, len(os.listdir("/proc/self/fd")), seconds]
                ),
                file=file,
            )
        return metrics

    return run


def read_samples(run: Path) -> list[list[float]]:
    """Return iteration, memory in KiB, open files and seconds since the start, of each iteration,
    also of lost ones.
    """
    path = run / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def restart_until_finished(
    run: Path, samples: list[list[float]], generator: random.Random
) -> Counter:
    """Restart a killed run until it finishes; return the counts of the exit codes, or minus the
    signals.

    A process is killed while it loads, or within its first three iterations, timed by ``samples``.
    """
    first, fourth = samples[0][-1], samples[3][-1]
    codes: Counter = Counter()
    idle = done = 0
    while idle < MAX_IDLE_RESTARTS:
        seconds = generator.uniform(first / 2, fourth)
        code = run_process(run, seconds, generator.choice((signal.SIGKILL, signal.SIGTERM)))
        if code == 2 and (run / "run" / "checkpoints" / f"{ITERATIONS:06d}").is_dir():
            code = 0  # killed after its last checkpoint: nothing was left to train
        codes[code] += 1
        if code not in (75, -signal.SIGKILL, -signal.SIGTERM):
            break
        before, done = done, len(read_samples(run))
        idle = idle + 1 if done == before else 0
    return codes


def growth(samples: list[list[int]]) -> dict[str, float]:
    """Return the growth of memory and open files after the first fifth, in which caches fill."""
    later = np.array(samples[len(samples) // 5 :])
    slope = np.polyfit(later[:, 0], later[:, 1], 1)[0] if len(later) > 2 else 0.0
    return {
        "memory_slope_kib": float(slope),
        "handles_first": int(later[0, 2]),
        "handles_last": int(later[-1, 2]),
    }


def not_measured(metrics: dict) -> dict:
    """Return the metrics without times, memory and rates."""
    measured = ("time/", "memory/", "perf/")
    return {name: value for name, value in metrics.items() if not name.startswith(measured)}


def results(run: Path) -> dict:
    """Return everything that must not depend on interruptions."""
    last = run / "checkpoints" / f"{ITERATIONS:06d}"
    state = json.loads((last / "state.json").read_text())
    files = json.loads((last / format.DIGESTS).read_text())
    lines = [json.loads(line) for _, line in complete_lines(run / "metrics.jsonl")]
    # A run that is stopped between two saves has additional checkpoints.
    earlier = [path for path in last.parent.glob("[0-9]*") if path != last]
    remaining = (
        path
        for path in run.rglob("*")
        if not any(path.is_relative_to(folder) for folder in earlier)
    )
    state["metrics"] = not_measured(state["metrics"])
    return {
        "metrics": [not_measured(line) for line in lines],
        "tensors": {name: entry for name, entry in files.items() if name.endswith(".distcp")},
        "numbers": {
            name: value for name, value in state.items() if name not in ("settings", "run")
        },
        "files": sorted(str(path.relative_to(run)) for path in remaining),
    }


@pytest.mark.slow
def test_a_run_that_is_killed_repeatedly_equals_the_uninterrupted_run(tmp_path):
    uninterrupted, interrupted = tmp_path / "uninterrupted", tmp_path / "interrupted"
    assert run_process(uninterrupted, 0, 0) == 0, (uninterrupted / "log").read_text()
    codes = restart_until_finished(interrupted, read_samples(uninterrupted), random.Random(0))
    repeated = len(read_samples(interrupted)) - ITERATIONS
    figures = growth(read_samples(uninterrupted))
    print(
        f"{ITERATIONS} iterations, exit codes {dict(codes)}, {repeated} iterations repeated, "
        f"{figures}"
    )
    assert codes[0] == 1 and codes.total() > 1, (interrupted / "log").read_text()
    expected, found = results(uninterrupted / "run"), results(interrupted / "run")
    for name in expected:
        assert found[name] == expected[name], f"{name} differ"
    assert ITERATIONS < MIN_ITERATIONS_TO_FIT or figures["memory_slope_kib"] <= MAX_SLOPE
    assert figures["handles_last"] <= figures["handles_first"] + 2


# --- two ranks under the launcher -----------------------------------------------------------------

RANKS = SETTINGS | {
    "config": "configs/smoke.yaml",
    "valid_video_csv": "assets/miniature/prompts/smoke.csv",
    "validation_interval": 3,
    "validation_steps": 2,
    "validation_batch_size": 2,
    "batch_size": 1,
    "mini_batch_size_per_update": 1,
    "enable_fsdp": "true",
    "optimizer": "muon",
    "num_updates_per_rollout": 1,
    "update_ref_model_step": 4,
    "save_interval": 1,
    "max_steps": 7,
}
# Stage, how many times it is entered in the iteration, iteration, and signal; one process each.
FAULTS = [
    ("load", 1, 0, "KILL"),
    ("conditions", 1, 1, "KILL"),
    ("rollout", 2, 1, "KILL"),
    ("decode", 2, 2, "KILL"),
    ("anchor", 3, 2, "USR1"),
    ("anchor", 3, 2, "KILL"),
    ("reward", 1, 3, "KILL"),
    ("record", 1, 3, "KILL"),
    ("validation", 3, 3, "KILL"),
    ("validation", 3, 3, "USR1"),
    ("rollout", 2, 4, "USR1"),
    ("update", 3, 4, "KILL"),
    ("update", 3, 4, "USR1"),
    ("save", 1, 4, "KILL"),
    ("reward", 1, 5, "USR1"),
    ("writing", 1, 5, "KILL"),
    ("end", 1, 7, "KILL"),
]


def train_with_fault():
    """Program of a rank: train, and if the next fault is for this rank, send it to this process."""
    folder = Path(os.environ["SOAK"])
    number = next((n for n in range(len(FAULTS)) if not (folder / str(n)).exists()), None)
    if os.environ.get("SOAK_UNINTERRUPTED") or number is None or processes.rank() != number % 2:
        sys.exit(post_train.main())
    stage, times, iteration, kind = FAULTS[number]
    entered: Counter = Counter()

    def enter(name, at):
        entered[name, at] += 1
        if name == stage and at == iteration and entered[name, at] == times:
            (folder / str(number)).touch()
            os.kill(os.getpid(), getattr(signal, f"SIG{kind}"))

    real, digest_files = Watchdog.enter, checkpoint_writer.digest_files
    Watchdog.enter = lambda watchdog, name, at=0: (enter(name, at), real(watchdog, name, at))
    checkpoint_writer.digest_files = lambda path, **share: (
        enter("writing", int(path.name.split(".")[1])),
        digest_files(path, **share),
    )[1]
    sys.exit(post_train.main())


def launch_ranks(folder: Path, **variables) -> int:
    """Start two ranks with the launcher and return its exit code."""
    folder.mkdir(exist_ok=True)
    flags = [f"--{name}={value}" for name, value in RANKS.items()] + [
        f"--output_dir={folder / 'run'}"
    ]
    command = [
        python(),
        "-m",
        "scripts.launch",
        "--standalone",
        "--nproc_per_node=2",
    ]
    variables |= {
        "SOAK": str(folder),
        "PYTHON_EXEC": python(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command += ["-m", "tests.training.test_soak", *flags]
    with open(folder / "log", "a") as log:
        environment = os.environ | variables
        return subprocess.run(
            command, cwd=ROOT, stdout=log, stderr=log, env=environment, timeout=1800
        ).returncode


def read_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the last checkpoint."""
    folder = run / "checkpoints" / f"{RANKS['max_steps']:06d}"
    shapes = read_shapes(folder / format.TENSORS)
    tensors = {
        name: torch.zeros(stored.size, dtype=stored.properties.dtype)
        for name, stored in shapes.items()
    }
    loading.load_tensors(folder, tensors)
    return tensors


@pytest.mark.slow
def test_two_ranks_with_a_fault_in_every_stage_equal_the_uninterrupted_run(tmp_path, monkeypatch):
    uninterrupted, interrupted, codes = tmp_path / "uninterrupted", tmp_path / "interrupted", []
    assert launch_ranks(uninterrupted, SOAK_UNINTERRUPTED="1") == 0, (
        uninterrupted / "log"
    ).read_text()
    while not codes or codes[-1] in (1, 75):
        codes.append(launch_ranks(interrupted))
    injected = [number for number in range(len(FAULTS)) if (interrupted / str(number)).exists()]
    assert injected == list(range(len(FAULTS))), (interrupted / "log").read_text()
    # After the last fault, at the end of the run, nothing is left to train.
    expected_codes = [75 if kind == "USR1" else 1 for *_, kind in FAULTS]
    assert codes == [*expected_codes, 0], (interrupted / "log").read_text()
    monkeypatch.setattr("tests.training.test_soak.ITERATIONS", RANKS["max_steps"])
    expected, found = results(uninterrupted / "run"), results(interrupted / "run")
    expected["files"].remove("before_after.png")  # written after the last fault
    # the position of tensors in their files may differ
    for name in ("metrics", "numbers", "files"):
        assert found[name] == expected[name], f"{name} differ"
    expected, found = read_tensors(uninterrupted / "run"), read_tensors(interrupted / "run")
    assert len(found) > 1000 and found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not tensor.equal(expected[name])] == []
    assert (
        "returned a view"
        not in (uninterrupted / "log").read_text() + (interrupted / "log").read_text()
    )


if __name__ == "__main__":
    train_with_fault()
