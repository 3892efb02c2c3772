"""Training of the runs of a study, several at a time in separate processes, and the plan with its
cost.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hyvideo.checks.rules import check
from hyvideo.files.cli import exit_on_signals
from hyvideo.files.files import ROOT
from hyvideo.files.text import counted
from hyvideo.planning.hardware import Hardware
from hyvideo.planning.hours import whole_run
from hyvideo.planning.planned_run import PlannedRun
from studies.recipes.runs import RecipeRun, RecipeStudy, RunProgress, progress

POST_TRAIN = ROOT / "post_train.py"


@dataclass(frozen=True)
class RunPlan:
    """Progress of a run, and the cost of the whole run including validations."""

    run: RecipeRun
    progress: RunProgress
    max_steps: int
    rollouts: int  # of the whole run
    # transformer forward passes of the whole run; a forward and backward pass counts as 3 to 4
    forwards: float
    gpu_hours: float  # of the whole run, predicted by `whole_run`; 0 if unknown

    @property
    def left(self) -> float:
        """Remaining fraction of the run."""
        return 0.0 if self.progress.is_finished else 1 - self.progress.saved / self.max_steps


def planned(study: RecipeStudy, run: RecipeRun, *, trains: bool) -> PlannedRun:
    """Return a run for the planner.

    Raises ValueError for invalid settings, also for this machine if ``trains``.
    """
    config = study.config(run)
    inputs = check(config, study.world_size, on_this_machine=trains)
    return PlannedRun(config, study.world_size, inputs.architecture, files=inputs.files)


def plan_run(study: RecipeStudy, run: RecipeRun, *, trains: bool = True) -> RunPlan:
    """Return progress and cost of a run.

    Raises ValueError like `planned`, or if it started with other settings.
    """
    whole = planned(study, run, trains=trains)
    config = whole.config
    if not config.data.valid_video_csv:
        raise ValueError(
            "valid_video_csv must name a CSV with the prompts to evaluate policies on; it is empty"
        )
    length = whole_run(whole)
    steps = config.optimizer.max_steps
    rollouts = whole.plan.rollouts
    hours = length.gpu_hours if whole.is_timed else 0.0
    return RunPlan(
        run, progress(study.folder(run), config), steps, rollouts * steps, length.forwards, hours
    )


def describe(study: RecipeStudy, plans: list[RunPlan]) -> str:
    """Format the plan: a line for each run, the totals, and the command of the first run
    to train.
    """
    to_run = [plan for plan in plans if not plan.progress.is_finished]
    rollouts = sum(plan.left * plan.rollouts for plan in to_run)
    forwards = sum(plan.left * plan.forwards for plan in to_run)
    hours = sum(plan.left * plan.gpu_hours for plan in to_run)
    lines = [f"{'cell':<44} {'iterations':>12} {'rollouts left':>14} {'forwards left':>14}"]
    for plan in plans:
        saved = (
            "finished" if plan.progress.is_finished else f"{plan.progress.saved}/{plan.max_steps}"
        )
        left = f"{plan.left * plan.rollouts:>14,.0f} {plan.left * plan.forwards:>14,.0f}"
        lines.append(f"{plan.run.name:<44} {saved:>12} {left}")
    lines.append(
        f"{len(plans)} cells, {len(to_run)} to run: {rollouts:,.0f} rollouts, {forwards:,.0f} "
        "transformer forward passes at most (a forward and backward pass counts as 3, or up to 4 "
        "with activation checkpointing)"
    )
    if hours:
        lines.append(
            f"{hours:,.0f} GPU-hours at {Hardware.rate:g} TFLOP/s per GPU (predicted, not measured)"
        )
    if to_run:
        lines.append(f"first command: {' '.join(command(study, to_run[0].run))}")
    return "\n".join(lines)


def command(study: RecipeStudy, run: RecipeRun) -> list[str]:
    """Return the command line that trains a run."""
    start = [sys.executable]
    if study.num_gpus:
        start += ["-m", "scripts.launch", "--standalone", "--nproc_per_node", str(study.num_gpus)]
    return [*start, str(POST_TRAIN), *study.flags(run)]


def time_left(took: Sequence[float], num_runs: int, jobs: int) -> str:
    """Return how many runs are left, and about how long they take: the mean of the seconds so far."""
    left = num_runs - len(took)
    if not left:
        return "no run left"
    minutes = left * sum(took) / len(took) / jobs / 60
    return f"{counted(left, 'run')} left, about {counted(max(1, round(minutes)), 'minute')}"


def train_runs(study: RecipeStudy, runs: list[RecipeRun], *, jobs: int) -> bool:
    """Train runs, ``jobs`` at a time, and return whether all succeeded.

    An interruption terminates them.
    """
    logs = study.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if runs:
        print(f"the output of each run is in {logs}", flush=True)
    running: set[subprocess.Popen] = set()
    # so that scripts.launch is found from any folder
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}

    took: list[float] = []  # seconds of each run that has ended

    def train(run: RecipeRun) -> int:
        path = logs / f"{run.name}.log"
        print(f"{run.name}: training, log {path}", flush=True)
        start = time.monotonic()
        with open(path, "ab") as log:
            process = subprocess.Popen(command(study, run), stdout=log, stderr=log, env=environment)
            running.add(process)
            code = process.wait()
            running.discard(process)
        took.append(time.monotonic() - start)
        outcome = f"failed with exit code {code}, see {path}" if code else "trained"
        print(f"{run.name}: {outcome}, {time_left(took, len(runs), jobs)}", flush=True)
        return code

    # a run that continues would block its folder for the next start
    with exit_on_signals():
        pool = ThreadPoolExecutor(jobs)
        try:
            codes = list(pool.map(train, runs))
            return not any(codes)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
            pool.shutdown(wait=True)
