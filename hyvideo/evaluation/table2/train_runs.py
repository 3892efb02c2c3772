"""Trains the runs of a study, some at a time, each in processes of its own, and says before what that will cost."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hyvideo.config.memory.hardware import Hardware
from hyvideo.config.memory.model_sizes import Architecture, read_architecture
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.memory.whole_run import whole_run
from hyvideo.config.rules import check
from hyvideo.config.run_plan import make_plan
from hyvideo.config.sections import RecordSettings
from hyvideo.data.outside import ROOT
from hyvideo.data.prompts import read_requests
from hyvideo.evaluation.reward_hacking.rule import check_output_dir
from hyvideo.evaluation.table2.runs import Progress, Study, TableRun, progress

POST_TRAIN = ROOT / "post_train.py"


@dataclass(frozen=True)
class RunPlan:
    """State of a run, and what all of it costs, its validations included."""

    run: TableRun
    progress: Progress
    max_steps: int
    rollouts: int  # of the whole run
    forwards: float  # transformer evaluations of the whole run, a forward and backward pass as 3 to 4
    gpu_hours: float  # of the whole run as `whole_run` predicts them; 0 where it cannot

    @property
    def left(self) -> float:
        """Part of the run that is still to be done."""
        return 0.0 if self.progress.is_finished else 1 - self.progress.saved / self.max_steps


def plan_run(study: Study, run: TableRun, *, trains: bool = True) -> RunPlan:
    """State, cost. Raises ValueError for broken rules, the machine's too if it ``trains``, or a run begun otherwise."""
    config = study.config(run)
    world_size = max(1, study.num_gpus)
    check(config, world_size, on_this_machine=trains)
    check_output_dir(config.record)
    if not config.data.valid_video_csv:
        raise ValueError("valid_video_csv must name the held-out prompts that the table is measured on, got nothing")
    plan = make_plan(config, world_size)
    steps, architecture, is_timed = config.optimizer.max_steps, Architecture(), False
    with suppress(ValueError):  # for a transformer that is not here and was never released
        architecture = read_architecture(config.model.pretrained_model_root, config.model.transformer_version)
        is_timed = architecture.is_released
    length = whole_run(PlannedRun(config, world_size, architecture))
    hours = length.gpu_hours if is_timed else 0.0
    return RunPlan(run, progress(study.folder(run), config), steps, plan.rollouts * steps, length.forwards, hours)


def validation_forwards(settings: RecordSettings, valid_video_csv: list[str], num_branches: int) -> int:
    """Transformer evaluations of one validation, or of one evaluation of a policy."""
    videos = len(read_requests(*valid_video_csv)) * settings.validation_repeats
    return videos * settings.validation_steps * num_branches


def describe(study: Study, plans: list[RunPlan], *, evaluates: bool = True) -> str:
    """The plan in words: a line for each run, the sums, and the command of the first run that is to be trained.

    Args:
        evaluates: The runs are evaluated in the end, which is counted too.
    """
    lines = [f"{'cell':<44} {'iterations':>12} {'rollouts left':>14} {'forwards left':>14}"]
    for plan in plans:
        done = "finished" if plan.progress.is_finished else f"{plan.progress.saved}/{plan.max_steps}"
        left = f"{plan.left * plan.rollouts:>14,.0f} {plan.left * plan.forwards:>14,.0f}"
        lines.append(f"{plan.run.name:<44} {done:>12} {left}")
    to_run = [plan for plan in plans if not plan.progress.is_finished]
    rollouts = sum(plan.left * plan.rollouts for plan in to_run)
    forwards = sum(plan.left * plan.forwards for plan in to_run)
    hours = sum(plan.left * plan.gpu_hours for plan in to_run)
    lines += [
        f"{len(plans)} cells, {len(to_run)} to run: {rollouts:,.0f} rollouts, {forwards:,.0f} transformer forwards at "
        "most (a forward and backward pass counts as 3, and as 4 at most with what is recomputed)",
        *([f"{hours:,.0f} GPU-hours at {Hardware.rate:g} TFLOP/s a GPU, predicted, not measured"] if hours else []),
    ]
    if evaluates:
        measured = study.evaluation_config()
        per_policy = validation_forwards(measured.record, measured.data.valid_video_csv, measured.num_branches)
        evaluation = (1 + len(plans)) * per_policy
        lines.append(f"evaluation of {len(plans)} cells and the base: {evaluation:,} transformer forwards")
    if to_run:
        lines.append("for instance: " + " ".join(command(study, to_run[0].run)))
    return "\n".join(lines)


def command(study: Study, run: TableRun) -> list[str]:
    """Command line that trains a run."""
    start = [sys.executable]
    if study.num_gpus:
        start += ["-m", "scripts.launch", "--standalone", "--nproc_per_node", str(study.num_gpus)]
    return [*start, str(POST_TRAIN), *study.flags(run)]


def train_runs(study: Study, runs: list[TableRun], *, jobs: int) -> dict[TableRun, Path]:
    """Trains runs, ``jobs`` at a time; gives the logs of those that failed. Stopping this stops them."""
    logs = study.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    running: set[subprocess.Popen] = set()
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # to scripts.launch, from any folder
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}

    def train(run: TableRun) -> int:
        with open(logs / f"{run.name}.log", "ab") as log:
            process = subprocess.Popen(command(study, run), stdout=log, stderr=log, env=environment)
            running.add(process)
            try:
                return process.wait()
            finally:
                running.discard(process)

    failed: dict[TableRun, Path] = {}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` is reached
    pool = ThreadPoolExecutor(jobs)
    try:
        pending = {pool.submit(train, run): run for run in runs}
        for number, future in enumerate(as_completed(pending), start=1):
            run, code = pending[future], future.result()
            if code:
                failed[run] = logs / f"{run.name}.log"
            message = f"failed with code {code}, see {failed[run]}" if code else "trained"
            print(f"{number}/{len(runs)} {run.name}: {message}", flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            process.terminate()
        pool.shutdown(wait=True)
        signal.signal(signal.SIGTERM, before)
    return failed
