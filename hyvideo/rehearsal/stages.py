"""Stages of a rehearsal: the commands of a run as its user gives them, each in new processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyvideo.checkpoints.format import folder_of
from hyvideo.files.cli import exit_on_signals
from hyvideo.files.files import ROOT

STAND_INS = "hyvideo/rehearsal/stand_ins.py"
KIB = 1024


@dataclass(frozen=True)
class Stage:
    """A command of a rehearsal."""

    name: str
    program: tuple[str, ...]  # of the project, with its arguments
    processes: int = 1
    has_stand_ins: bool = True
    has_real_decoder: bool = False

    def command(self) -> list[str]:
        """Return the words of the command line, for the root of the project as working
        directory.
        """
        if not self.has_stand_ins:
            return [sys.executable, *self.program]
        decoder = ["--real_decoder"] if self.has_real_decoder else []
        words = [STAND_INS, *decoder, *self.program]
        if self.processes == 1:
            return [sys.executable, *words]
        torchrun = ["-m", "scripts.launch", "--standalone", f"--nproc_per_node={self.processes}"]
        return [sys.executable, *torchrun, *words]


@dataclass(frozen=True)
class StageResult:
    """Outcome of a stage."""

    stage: Stage
    seconds: float
    peak_gib: float  # of the largest process
    problems: list[str]  # empty if the exit code is 0
    log: Path


def run_stage(stage: Stage, folder: Path) -> StageResult:
    """Run a stage, with its output in ``folder``/<name>.log, and return its outcome."""
    log = folder / f"{stage.name}.log"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    if stage.processes > 1:
        threads = max(1, (os.cpu_count() or 1) // stage.processes)
        environment["OMP_NUM_THREADS"] = str(threads)
    start = time.perf_counter()
    with exit_on_signals(), log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            stage.command(),
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    code = process.returncode = os.waitstatus_to_exitcode(status)
    problems = [] if code == 0 else [f"exit code {code}", *_last_lines(log)]
    return StageResult(
        stage=stage,
        seconds=time.perf_counter() - start,
        peak_gib=usage.ru_maxrss * KIB / 2**30,
        problems=problems,
        log=log,
    )


def _last_lines(log: Path, number: int = 5) -> list[str]:
    """Return the last lines of a log that are not progress bars."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip() and "\r" not in line][-number:]


def stages_of(
    folder: Path, processes: int, *, has_validation: bool, improves: bool
) -> Iterator[Stage]:
    """Yield the stages of a rehearsal of a run with ``processes`` processes: the run, and the programs
    that follow it. A run with validation is evaluated, and one that fine-tunes on videos ``improves``
    the model in a round of its own.

    The folder has the settings of the run in settings.yaml, and the prompt to generate in
    generate.csv.
    """
    train = ("post_train.py", "--config", str(folder / "settings.yaml"))
    checkpoint = str(folder_of(folder / "run", 2))
    yield Stage("train", train, processes)
    yield Stage("resume", (*train, "--max_steps", "2"), processes)
    yield Stage(
        "generate",
        (
            "generate.py",
            "--checkpoint_path",
            checkpoint,
            "--valid_video_csv",
            str(folder / "generate.csv"),
            "--output_path",
            str(folder / "videos"),
        ),
        has_real_decoder=True,
    )
    if has_validation:
        yield Stage(
            "evaluate",
            (
                "-m",
                "scripts.evaluate",
                "--checkpoint_path",
                checkpoint,
                "--output_dir",
                str(folder / "scores"),
            ),
        )
    if improves:
        yield Stage(
            "improve",
            (
                "-m",
                "scripts.improve",
                "--config",
                str(folder / "settings.yaml"),
                "--prompts_csv",
                str(folder / "generate.csv"),
                "--num_videos",
                "2",
                "--improve_dir",
                str(folder / "improved"),
            ),
        )
    yield Stage(
        "export",
        (
            "-m",
            "scripts.export",
            "--checkpoint_path",
            checkpoint,
            "--output_dir",
            str(folder / "exported"),
        ),
        has_stand_ins=False,
    )
    yield Stage(
        "report",
        (
            "-m",
            "scripts.report",
            str(folder / "run"),
            "--output_path",
            str(folder / "comparison.html"),
        ),
        has_stand_ins=False,
    )
