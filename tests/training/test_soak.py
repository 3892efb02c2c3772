"""A small run is killed again and again until it is done, and is bit for bit the run that nobody killed.

Every life is a process, ended after a random time by kill -9 or by SIGTERM. Of the unbroken run the memory and the open
files are sampled after every iteration. docs/reliability.md has the figures of a long one: ``SOAK_ITERATIONS=200``.

A second run has two ranks, of which one is struck in every stage, under the agent that starts them again.
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
from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5  # noqa: F401, no part of a life

import post_train
from hyvideo.config import processes
from hyvideo.distributed import checkpoint, manifest
from hyvideo.distributed.checkpoint_reader import read_shapes
from hyvideo.distributed.watchdog import Watchdog
from hyvideo.miniature import reward  # noqa: F401
from hyvideo.records.metrics_file import whole_lines
from hyvideo.trainer import Trainer
from tests.forked import python

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "valid_video_csv": "",
    "report_to": "none",
    "check_reward": "false",
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
    "resume_from_checkpoint": "latest",
}
ITERATIONS = int(os.environ.get("SOAK_ITERATIONS", "8"))
MAX_SLOPE = 64.0  # KiB of memory an iteration
LEAST_TO_FIT = 100  # iterations: before, memory settles
MAX_IDLE_LIVES = 30


def live(run: Path, seconds: float, number: int) -> int:
    """Trains, or goes on, in a process that a signal ends after so many seconds; gives its exit code."""
    run.mkdir(exist_ok=True)
    program = "from tests.training.test_soak import train; train()"
    flags = [f"--{name}={value}" for name, value in SETTINGS.items()]
    flags += [f"--max_steps={ITERATIONS}", f"--output_dir={run / 'run'}"]
    command = [sys.executable, "-c", program, run / "samples.jsonl", str(seconds), str(int(number)), *flags]
    with open(run / "log", "a") as log:
        return subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=3600).returncode


def train():
    """The program of such a process."""
    samples, seconds, number, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    Trainer.run_iteration = sampled(Trainer.run_iteration, Path(samples))
    sys.argv = ["post_train.py", "--config", "configs/smoke.yaml", *flags]
    if float(seconds):
        end = threading.Timer(float(seconds), os.kill, (os.getpid(), int(number)))
        end.daemon = True
        end.start()
    sys.exit(post_train.main())


def sampled(run_iteration, path):
    """Notes memory, open files and seconds after every iteration."""
    start = time.monotonic()

    def run(*arguments):
        metrics = run_iteration(*arguments)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE") // 1024
        with open(path, "a") as file:
            seconds = time.monotonic() - start
            print(json.dumps([arguments[0].iteration, memory, len(os.listdir("/proc/self/fd")), seconds]), file=file)
        return metrics

    return run


def read_samples(run: Path) -> list[list[float]]:
    """Iteration, memory in KiB, open files and seconds since the start, of each that was finished, even if lost."""
    path = run / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def live_until_done(run: Path, unbroken: list[list[float]], chance: random.Random) -> Counter:
    """Exit codes of the lives of a run, or minus the signal that ended one, and how often.

    A life ends while it loads, or within its first three iterations.
    """
    first, fourth = unbroken[0][-1], unbroken[3][-1]
    ends: Counter = Counter()
    idle = done = 0
    while idle < MAX_IDLE_LIVES:
        code = live(run, chance.uniform(first / 2, fourth), chance.choice((signal.SIGKILL, signal.SIGTERM)))
        if code == 2 and (run / "run" / "checkpoints" / f"{ITERATIONS:06d}").is_dir():
            code = 0  # it was done, and killed on its way out: there was nothing left to train
        ends[code] += 1
        if code not in (75, -signal.SIGKILL, -signal.SIGTERM):
            break
        before, done = done, len(read_samples(run))
        idle = idle + 1 if done == before else 0
    return ends


def growth(samples: list[list[int]]) -> dict[str, float]:
    """Memory and open files after the first fifth, in which caches fill."""
    later = np.array(samples[len(samples) // 5 :])
    slope = np.polyfit(later[:, 0], later[:, 1], 1)[0] if len(later) > 2 else 0.0
    return {"memory_slope_kib": float(slope), "handles_first": int(later[0, 2]), "handles_last": int(later[-1, 2])}


def facts(run: Path) -> dict:
    """What must not depend on how often a run was ended."""
    last = run / "checkpoints" / f"{ITERATIONS:06d}"
    state = json.loads((last / "state.json").read_text())
    files = json.loads((last / "manifest.json").read_text())
    lines = [json.loads(line) for _, line in whole_lines(run / "metrics.jsonl")]
    # Who leaves between two saves leaves a checkpoint more.
    earlier = [path for path in last.parent.glob("[0-9]*") if path != last]
    kept = (path for path in run.rglob("*") if not any(path.is_relative_to(folder) for folder in earlier))
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines],
        "tensors": {name: entry for name, entry in files.items() if name.endswith(".distcp")},
        "numbers": {name: value for name, value in state.items() if name != "settings"},
        "files": sorted(str(path.relative_to(run)) for path in kept),
    }


@pytest.mark.slow
def test_a_run_killed_again_and_again_is_the_unbroken_one(tmp_path):
    whole, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert live(whole, 0, 0) == 0, (whole / "log").read_text()
    ends = live_until_done(broken, read_samples(whole), random.Random(0))
    again = len(read_samples(broken)) - ITERATIONS
    figures = growth(read_samples(whole))
    print(f"{ITERATIONS} iterations, ended {dict(ends)}, {again} iterations done again, {figures}")
    assert ends[0] == 1 and ends.total() > 1, (broken / "log").read_text()
    expected, ours = facts(whole / "run"), facts(broken / "run")
    for name in expected:
        assert ours[name] == expected[name], f"{name} differ"
    assert ITERATIONS < LEAST_TO_FIT or figures["memory_slope_kib"] <= MAX_SLOPE
    assert figures["handles_last"] <= figures["handles_first"] + 2


def test_memory_that_grows_is_measured():
    samples = [[k, 1000 + 70 * k, 9 + (k > 30)] for k in range(1, 51)]
    grown = growth(samples)
    assert grown["memory_slope_kib"] == pytest.approx(70)
    assert grown["handles_last"] == grown["handles_first"] + 1


# --- two ranks under the agent ----------------------------------------------------------------------------------------

RANKS = SETTINGS | {
    "config": "configs/smoke.yaml",
    "valid_video_csv": "assets/miniature/prompts/smoke.csv",
    "validation_interval": 3,
    "validation_steps": 2,
    "validation_batch_size": 2,
    "batch_size": 1,
    "mini_batch_size_per_update": 1,
    "enable_fsdp": "true",
    "use_muon": "true",
    "num_updates_per_rollout": 1,
    "update_ref_model_step": 4,
    "save_interval": 1,
    "max_steps": 7,
}
# Stage, the how manieth time that it is entered in the iteration, the iteration, and the signal; one life each.
STRIKES = [
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


def train_and_strike():
    """The program of a rank: trains, and in one of every two lives ends itself where this life is to be struck."""
    folder = Path(os.environ["SOAK"])
    number = next((n for n in range(len(STRIKES)) if not (folder / str(n)).exists()), None)
    if os.environ.get("SOAK_UNBROKEN") or number is None or processes.rank() != number % 2:
        sys.exit(post_train.main())
    stage, times, iteration, kind = STRIKES[number]
    entered: Counter = Counter()

    def enter(name, at):
        entered[name, at] += 1
        if name == stage and at == iteration and entered[name, at] == times:
            (folder / str(number)).touch()
            os.kill(os.getpid(), getattr(signal, f"SIG{kind}"))

    real, hash_share = Watchdog.enter, manifest.hash_share
    Watchdog.enter = lambda watchdog, name, at=0: (enter(name, at), real(watchdog, name, at))
    manifest.hash_share = lambda path, mesh: (enter("writing", int(path.name.split(".")[1])), hash_share(path, mesh))[1]
    sys.exit(post_train.main())


def launch_ranks(folder: Path, **variables) -> int:
    """Starts two ranks by the agent, which starts them again where one is killed; gives its exit code."""
    folder.mkdir(exist_ok=True)
    flags = [f"--{name}={value}" for name, value in RANKS.items()] + [f"--output_dir={folder / 'run'}"]
    command = [python(), "-m", "scripts.launch", "--standalone", "--nproc_per_node=2", f"--max-restarts={len(STRIKES)}"]
    own = {"SOAK": str(folder), "PYTHON_EXEC": python(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command += ["-m", "tests.training.test_soak", *flags]
    with open(folder / "log", "a") as log:
        environment = os.environ | own | variables
        return subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment, timeout=1800).returncode


def stored(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint."""
    folder = run / "checkpoints" / f"{RANKS['max_steps']:06d}"
    shapes = read_shapes(folder / checkpoint.TENSORS)
    tensors = {name: torch.zeros(one.size, dtype=one.properties.dtype) for name, one in shapes.items()}
    checkpoint.load_tensors(folder, tensors)
    return tensors


@pytest.mark.slow
def test_two_ranks_of_which_one_is_struck_in_every_stage_are_the_unbroken_run(tmp_path, monkeypatch):
    whole, broken, codes = tmp_path / "unbroken", tmp_path / "broken", []
    assert launch_ranks(whole, SOAK_UNBROKEN="1") == 0, (whole / "log").read_text()
    while not codes or codes[-1] == 75:
        codes.append(launch_ranks(broken))
    struck = [number for number in range(len(STRIKES)) if (broken / str(number)).exists()]
    assert struck == list(range(len(STRIKES))), (broken / "log").read_text()
    # Struck on its way out it has nothing left to train.
    assert codes == [75] * sum(kind == "USR1" for *_, kind in STRIKES) + [2], (broken / "log").read_text()
    monkeypatch.setattr("tests.training.test_soak.ITERATIONS", RANKS["max_steps"])
    expected, ours = facts(whole / "run"), facts(broken / "run")
    expected["files"].remove("before_after.png")  # made after the last life was struck
    for name in ("metrics", "numbers", "files"):  # where in a file a tensor lies may differ
        assert ours[name] == expected[name], f"{name} differ"
    expected, ours = stored(whole / "run"), stored(broken / "run")
    assert len(ours) > 1000 and ours.keys() == expected.keys()
    assert [name for name, tensor in ours.items() if not tensor.equal(expected[name])] == []
    assert "returned a view" not in (whole / "log").read_text() + (broken / "log").read_text()


if __name__ == "__main__":
    train_and_strike()
