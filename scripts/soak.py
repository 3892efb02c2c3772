"""Kills a small run again and again until it is done, and compares it with the run that nobody killed, bit for bit.

    python scripts/soak.py --iterations 200 --lifetime 1 6

Every life is a process of its own, ended after a random time by kill -9 or by SIGTERM. Of the unbroken run the memory
and the open files are sampled after every iteration. Ends with code 1 where the two runs differ, or where the unbroken
one grows.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import post_train  # noqa: E402
from hyvideo.records.metrics_file import whole_lines  # noqa: E402
from hyvideo.trainer import Trainer  # noqa: E402

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
MAX_SLOPE = 64.0  # KiB of memory an iteration
LEAST_TO_FIT = 100  # iterations: before, memory settles
MAX_IDLE_LIVES = 30
DONE = "0"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--lifetime", type=float, nargs=2, default=(1.0, 6.0), help="Seconds, least and most.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, help="A new folder; by default one that is removed.")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.output_dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return soak(folder, chosen.iterations, chosen.lifetime, random.Random(chosen.seed))


def soak(folder: Path, iterations: int, lifetime: tuple[float, float], chance: random.Random) -> int:
    whole, broken = folder / "unbroken", folder / "broken"
    start = time.monotonic()
    status = os.waitpid(begin(whole, iterations), 0)[1]
    if status:
        print((whole / "log").read_text(), file=sys.stderr)
        return 1
    unbroken_seconds, start = time.monotonic() - start, time.monotonic()
    ends = live_until_done(broken, iterations, lifetime, chance)
    samples = read_samples(whole)
    figures = {
        "iterations": iterations,
        "kills": sum(count for how, count in ends.items() if how != DONE),
        "ended": dict(ends),
        "iterations_done_again": len(read_samples(broken)) - iterations,
        "seconds_unbroken": round(unbroken_seconds, 1),
        "seconds_broken": round(time.monotonic() - start, 1),
        **growth(samples),
    }
    print(json.dumps(figures, indent=1))
    problems = [f"{what} differ" for what in compare(whole, broken, iterations)]
    if ends[DONE] != 1:
        problems.append(f"{MAX_IDLE_LIVES} lives without a finished iteration, or a failure: see {broken / 'log'}")
    if iterations >= LEAST_TO_FIT and figures["memory_slope_kib"] > MAX_SLOPE:
        problems.append("memory grows")
    if figures["handles_last"] > figures["handles_first"] + 2:
        problems.append("open files grow")
    print("\n".join(problems) or "the two runs are equal, bit for bit")
    return bool(problems)


def begin(run: Path, iterations: int) -> int:
    """Forks a process that trains, or goes on, and gives its id. Forked, since starting Python takes seconds."""
    run.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return pid
    log = os.open(run / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    flags = [f"--{name}={value}" for name, value in SETTINGS.items()]
    flags += [f"--max_steps={iterations}", f"--output_dir={run / 'run'}"]
    sys.argv = ["post_train.py", "--config", str(ROOT / "configs" / "smoke.yaml"), *flags]
    os.chdir(ROOT)
    Trainer.run_iteration = sampled(Trainer.run_iteration, run / "samples.jsonl")
    sys.exit(post_train.main())


def sampled(run_iteration, path: Path):
    """Notes memory and open files after every iteration."""

    def run(trainer, writer=None):
        metrics = run_iteration(trainer, writer)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE") // 1024
        with open(path, "a") as file:
            print(json.dumps([trainer.iteration, memory, len(os.listdir("/proc/self/fd"))]), file=file)
        return metrics

    return run


def read_samples(run: Path) -> list[list[int]]:
    """Iteration, memory in KiB and open files, of every iteration that was finished, whether or not it was lost."""
    path = run / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def live_until_done(run: Path, iterations: int, lifetime: tuple[float, float], chance: random.Random) -> Counter:
    """How the lives of a run ended: exit codes, or minus the signal."""
    ends: Counter = Counter()
    idle = done = 0
    while idle < MAX_IDLE_LIVES:
        pid = begin(run, iterations)
        code = end_after(pid, chance.uniform(*lifetime), chance.choice((signal.SIGKILL, signal.SIGTERM)))
        if code == 2 and (run / "run" / "checkpoints" / f"{iterations:06d}").is_dir():
            code = 0  # it was done, and killed on its way out: there was nothing left to train
        ends[str(code)] += 1
        if code not in (75, -signal.SIGKILL, -signal.SIGTERM):
            return ends
        before, done = done, len(read_samples(run))
        idle = idle + 1 if done == before else 0
    return ends


def end_after(pid: int, seconds: float, number: int) -> int:
    """Its exit code; it may end by itself before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def growth(samples: list[list[int]]) -> dict[str, float]:
    """Of the unbroken run, after the first fifth, in which caches fill."""
    later = np.array(samples[len(samples) // 5 :])
    slope = np.polyfit(later[:, 0], later[:, 1], 1)[0] if len(later) > 2 else 0.0
    return {
        "memory_first_mib": round(later[0, 1] / 1024, 1),
        "memory_last_mib": round(later[-1, 1] / 1024, 1),
        "memory_slope_kib": round(float(slope), 2),
        "handles_first": int(later[0, 2]),
        "handles_last": int(later[-1, 2]),
    }


def compare(whole: Path, broken: Path, iterations: int) -> list[str]:
    """What of the two runs is not the same."""
    ones, others = facts(whole / "run", iterations), facts(broken / "run", iterations)
    return [what for what in ones if ones[what] != others[what]]


def facts(run: Path, iterations: int) -> dict:
    lines = [json.loads(line) for _, line in whole_lines(run / "metrics.jsonl")]
    last = run / "checkpoints" / f"{iterations:06d}"
    if not last.is_dir():
        return dict.fromkeys(("metrics", "tensors", "numbers", "leftovers"))
    state = json.loads((last / "state.json").read_text())
    files = json.loads((last / "manifest.json").read_text())
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines],
        "tensors": {name: entry for name, entry in files.items() if name.endswith(".distcp")},
        "numbers": {name: value for name, value in state.items() if name != "settings"},
        "leftovers": sorted(p.name for p in (*(run / "spool").glob("*"), *(run / "checkpoints").glob(".*"))),
    }


if __name__ == "__main__":
    sys.exit(main())
