"""Faults in every stage of a run: lost work is repeated, and the result equals that of an
uninterrupted run.
"""

import json
import math
import os
import re
import resource
import signal
import subprocess
import time
from collections import Counter
from itertools import cycle
from typing import NamedTuple

import pytest

from hyvideo.records.metrics_file import complete_lines
from hyvideo.trainer import Trainer
from tests.forked import ROOT, python
from tests.test_trainer import CPU, Redness
from tests.training.test_run_state import SETTINGS, train_iterations

pytestmark = pytest.mark.system

# The fault is injected in the new process before the program starts; the product has no code for
# it.
PROGRAM = """
import sys
import post_train
from hyvideo.config import processes
from tests.training import test_faults
test_faults.{}(*{})
processes.exit_on_signals()
sys.exit(processes.end_soon(post_train.main()))
"""
STAGES = ("conditions", "rollout", "reward", "anchor", "update", "save")
FAULT_ITERATIONS = {stage: number for number, stage in enumerate(STAGES, start=2)}
LAST = len(STAGES) + 2
BATCHES = SETTINGS["gradient_accumulation_steps"]
RUN = SETTINGS | {
    "valid_video_csv": "",
    "cfg_scale": 1.0,
    "report_to": "none",
    "check_reward": "false",
    "log_video_interval": 0,
    "max_steps": LAST,
    "save_interval": 1,
    "save_total_limit": 0,
    "save_asynchronously": "false",
    "kl_strategy": "dual_moving",
    "update_ref_model_step": 6,
    "lora_rank": 2,  # small checkpoints; test_run_state.py covers the other kinds
    "ema_decay": 0.0,
    "resume_from_checkpoint": "latest",
}
SIGNALS = {name: signal.Signals[f"SIG{name}"] for name in ("KILL", "TERM", "INT", "STOP", "HUP")}


def inject(log, stage="", iteration=0, kind="KILL", rank=0):
    """Send this process a signal in the middle of a stage of an iteration, and log every call of
    the sampler.

    Of several processes, only ``rank`` receives it, and only before their first restart.
    """
    import post_train
    from hyvideo.distributed import manifest

    build = post_train.build

    def build_faulty(*arguments):
        trainer = build(*arguments)

        def send_signals():
            is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if trainer.iteration == iteration and trainer.mesh.rank == rank and is_first_start:
                # until the watchdog has reported the stage
                time.sleep(0.5 if kind == "STOP" else 0)
                for name in kind.split():
                    os.kill(os.getpid(), SIGNALS[name])
                    time.sleep(0.05)  # lets a second signal of the same kind arrive separately

        calls = Counter()  # by iteration

        def faulty(function, is_target, number=1):
            def call(*arguments, **options):
                result = function(*arguments, **options)
                calls[function, trainer.iteration] += 1
                if is_target and calls[function, trainer.iteration] == number:
                    send_signals()
                return result

            return call

        def logged_sample(
            number, schedule, indices, conditions, sample=trainer.run.collector.sample, **options
        ):
            with open(log, "a") as file:
                print(number, indices[0].group, indices[0].member, file=file)
            rollout = sample(number, schedule, indices, conditions, **options)
            if stage == "rollout" and indices[0].group:  # in the second batch
                send_signals()
            return rollout

        trainer.run.collector.sample = logged_sample
        trainer.run.collector.encoder = faulty(trainer.run.encoder, stage == "conditions")
        for scorer in trainer.run.scorer.scorers.values():
            scorer.score = faulty(scorer.score, stage == "reward", number=2)
        trainer.run.objective.prepare = faulty(trainer.run.objective.prepare, stage == "anchor")
        trainer.run.update._step = faulty(trainer.run.update._step, stage == "update")
        manifest.hash_share = faulty(manifest.hash_share, stage == "save")
        return trainer

    post_train.build = build_faulty


class Result(NamedTuple):
    code: int  # exit code, or minus the signal that killed the process
    output: str  # stdout and stderr


class Run:
    """A run of one or several processes, and its files."""

    def __init__(self, folder):
        self.out, self.log = folder / "run", folder / "sampled"
        self.log.touch()

    def start(self, *fault, **settings):
        return self.start_with(inject, str(self.log), *fault, **settings)

    def start_with(self, function, *arguments, **settings):
        settings = RUN | {"output_dir": str(self.out)} | settings
        flags = [f"--{name}={value}" for name, value in settings.items()]
        program = PROGRAM.format(function.__name__, arguments)
        command = [python(), "-c", program, "--config", "configs/smoke.yaml", *flags]
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
        return Result(process.returncode, process.stdout + process.stderr)

    def sampled(self):
        return [tuple(map(int, line.split())) for line in self.log.read_text().splitlines()]

    def metrics(self):
        lines = [json.loads(line) for _, line in complete_lines(self.out / "metrics.jsonl")]
        return [
            {k: v for k, v in line.items() if not k.startswith(("time/", "memory/", "perf/"))}
            for line in lines
        ]

    def checkpoints(self):
        return sorted(
            path.name for path in (self.out / "checkpoints").iterdir() if path.name[0] == "0"
        )

    def saved(self, iteration=LAST):
        """Return the hashes of a checkpoint's tensors and its state, which are equal if and only if
        the runs are.
        """
        folder = self.out / "checkpoints" / f"{iteration:06d}"
        files = json.loads((folder / "manifest.json").read_text())
        state = json.loads((folder / "state.json").read_text())
        del state["settings"]
        return {name: entry for name, entry in files.items() if name.endswith(".distcp")}, state


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("uninterrupted"))
    result = run.start()
    assert result.code == 0, result.output
    assert len(run.sampled()) == LAST * BATCHES
    return run


@pytest.fixture(scope="module", params=["KILL", pytest.param("TERM", marks=pytest.mark.slow)])
def interrupted(request, tmp_path_factory):
    """A run that is interrupted in each of several stages and restarted each time."""
    run = Run(tmp_path_factory.mktemp(request.param))
    codes, outputs, newest = {}, {}, {}
    for stage in STAGES if request.config.getoption("--slow") else ("rollout", "update", "save"):
        result = run.start(stage, FAULT_ITERATIONS[stage], request.param)
        codes[stage], outputs[stage], newest[stage] = (
            result.code,
            result.output,
            run.checkpoints()[-1],
        )
    last = run.start()
    assert last.code == 0, last.output
    return request.param, run, codes, outputs, newest


def test_an_interrupted_process_leaves_a_checkpoint_of_its_last_finished_iteration(interrupted):
    kind, _, codes, outputs, newest = interrupted
    for stage in codes:
        iteration = FAULT_ITERATIONS[stage]
        assert codes[stage] == (-signal.SIGKILL if kind == "KILL" else 75), (stage, outputs[stage])
        # After SIGTERM, updates and saves are finished before the process exits.
        is_finished = kind == "TERM" and stage in ("update", "save")
        assert newest[stage] == f"{iteration - (not is_finished):06d}", stage
        if kind == "TERM":
            assert "stopped by SIGTERM" in outputs[stage] and "Traceback" not in outputs[stage], (
                outputs[stage]
            )


def test_a_run_with_many_restarts_equals_the_uninterrupted_run_bit_for_bit(
    interrupted, uninterrupted
):
    _, run, *_ = interrupted
    assert run.metrics() == uninterrupted.metrics()
    assert run.saved() == uninterrupted.saved()
    assert not list((run.out / "checkpoints").glob(".*"))


def test_only_rollouts_of_the_unfinished_iteration_are_repeated(interrupted, uninterrupted):
    kind, run, codes, *_ = interrupted
    repeated = {
        iteration
        for iteration, *_ in (sample for sample in run.sampled() if run.sampled().count(sample) > 1)
    }
    # No rollout is sampled before the end of the conditions stage; SIGTERM lets updates and saves
    # finish.
    without = ("conditions",) if kind == "KILL" else ("conditions", "update", "save")
    assert repeated == {FAULT_ITERATIONS[stage] for stage in codes if stage not in without}
    assert set(run.sampled()) == set(uninterrupted.sampled())


def test_ctrl_c_exits_after_the_stage_and_twice_exits_at_once(uninterrupted, tmp_path):
    run = Run(tmp_path)
    result = run.start("rollout", 2, "INT INT", max_steps=3)
    assert result.code == 130 and "Ctrl-C twice to exit at once" in result.output
    assert run.checkpoints() == ["000001"]
    result = run.start("update", 2, "INT", max_steps=3)
    assert result.code == 75 and run.checkpoints() == ["000001", "000002"]
    assert run.metrics() == uninterrupted.metrics()[:2]


def test_a_closed_terminal_saves_and_lost_output_does_not_end_the_run(uninterrupted, tmp_path):
    run = Run(tmp_path)
    result = run.start("rollout", 2, "HUP", max_steps=3, save_interval=9)
    assert result.code == 75 and "stopped by SIGHUP" in result.output
    assert run.checkpoints() == ["000001"]
    flags = [
        f"--{name}={value}"
        for name, value in (RUN | {"output_dir": run.out, "max_steps": 2}).items()
    ]
    reader, writer = os.pipe()
    os.close(reader)  # every write to the terminal now fails
    command = [python(), "post_train.py", "--config", "configs/smoke.yaml", *flags]
    code = subprocess.run(command, stdout=writer, stderr=writer, cwd=ROOT, timeout=120).returncode
    os.close(writer)
    assert code == 0
    assert (
        run.checkpoints() == ["000001", "000002"] and run.metrics() == uninterrupted.metrics()[:2]
    )


# --- signals while a scorer hangs, and outside of training ----------------------------------------


def hang_in_scorer():
    """Send this process a signal while a scorer hangs."""
    import post_train

    build = post_train.build

    def build_hanging(*arguments):
        def score(*_, **__):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(1000)

        trainer = build(*arguments)
        for scorer in trainer.run.scorer.scorers.values():
            scorer.score = score
        return trainer

    post_train.build = build_hanging


def signal_outside_of_training(place, number):
    """Send this process a signal while it loads, or while it prints the summary."""
    import post_train
    from hyvideo.report import run_summary

    module, name = (post_train, "build") if place == "load" else (run_summary, "print_summary")
    function = getattr(module, name)
    setattr(
        module, name, lambda *arguments: (os.kill(os.getpid(), number), function(*arguments))[1]
    )


@pytest.mark.slow
def test_a_scorer_that_hangs_does_not_keep_a_stopped_run_alive(tmp_path):
    # raises TimeoutExpired if it stays alive
    result = Run(tmp_path).start_with(hang_in_scorer, max_steps=1)
    assert result.code == 75 and "stopped by SIGUSR1" in result.output, result


@pytest.mark.parametrize(
    "place, kind, left",
    [
        pytest.param("load", "TERM", [], marks=pytest.mark.slow),
        ("load", "INT", []),
        ("summary", "USR1", [1]),
    ],
)
def test_a_signal_outside_of_training_ends_the_run_at_once_with_code_75(
    tmp_path, place, kind, left
):
    run, number = Run(tmp_path), signal.Signals[f"SIG{kind}"]
    result = run.start_with(signal_outside_of_training, place, int(number), max_steps=1)
    assert result.code == 75 and f"stopped by SIG{kind} outside of training" in result.output, (
        result
    )
    assert "Traceback" not in result.output
    assert sorted(path.name for path in run.out.glob("checkpoints/0*")) == [
        f"{iteration:06d}" for iteration in left
    ]


# --- a rank that hangs ----------------------------------------------------------------------------


def start_with_hanging_rank(folder, stage):
    """Start two ranks with a launcher; the second is stopped in a stage of iteration 2.

    Return the run and launcher.
    """
    run = Run(folder)
    call = "inject", (str(run.log), stage, 2, "STOP", 1)
    (folder / "program.py").write_text(PROGRAM.format(*call))
    launcher = ["-m", "scripts.launch", "--standalone", "--nproc_per_node=2", "--max-restarts=3"]
    limits = {"collective_timeout": 8, "watchdog_seconds": 3, "max_steps": 2}
    flags = [
        f"--{name}={value}" for name, value in (RUN | {"output_dir": str(run.out)} | limits).items()
    ]
    command = [
        python(),
        *launcher,
        str(folder / "program.py"),
        "--config",
        "configs/smoke.yaml",
        *flags,
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHON_EXEC": python(),
    }
    with open(folder / "output", "w") as output:
        return run, subprocess.Popen(
            command, stdout=output, stderr=output, cwd=ROOT, env=environment
        )


@pytest.fixture(scope="module", autouse=True)
def hanging(request, tmp_path_factory):
    """The run whose rank hangs in the stage ``anchor``: it mostly waits, so it starts before the
    tests of this file.
    """
    if not any("a_rank_that_hangs" in item.name for item in request.session.items):
        yield
        return
    started = start_with_hanging_rank(tmp_path_factory.mktemp("hanging"), "anchor")
    yield started
    started[1].kill()


# --- a full disk ----------------------------------------------------------------------------------


def fill_disk(first, last):
    """Let every write to a file fail from iteration ``first`` to ``last``; stdout and stderr are
    pipes.
    """
    import post_train

    pipe = subprocess.Popen(["cat"], stdin=subprocess.PIPE).stdin.fileno()
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)
    build = post_train.build

    def build_on_full_disk(*arguments):
        trainer = build(*arguments)
        run_iteration = trainer.run_iteration

        def run_with_limit(writer):
            is_full = first <= trainer.iteration <= last
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (0 if is_full else resource.RLIM_INFINITY, -1)
            )
            return run_iteration(writer)

        trainer.run_iteration = run_with_limit
        return trainer

    post_train.build = build_on_full_disk


@pytest.mark.slow
def test_a_temporarily_full_disk_costs_only_checkpoints(uninterrupted, tmp_path):
    run = Run(tmp_path)
    result = run.start_with(
        fill_disk, 2, 3, log_video_interval=2, report_to="tensorboard", max_steps=4
    )
    assert result.code == 0, result.output
    assert run.checkpoints() == ["000001", "000004"]
    for message in (
        "checkpoint NOT WRITTEN",
        "metrics.jsonl NOT WRITTEN",
        "videos of",
        "TensorBoardReport NOT WRITTEN",
    ):
        assert message in result.output, result.output
    assert "File too large" in result.output
    assert run.metrics() == uninterrupted.metrics()[:4] and run.saved(4) == uninterrupted.saved(4)
    assert not list((run.out / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_run_without_its_last_checkpoint_fails_and_resumes_from_an_earlier_one(
    uninterrupted, tmp_path
):
    run = Run(tmp_path)
    result = run.start_with(fill_disk, 2, LAST, max_steps=3)
    assert result.code == 1
    assert (
        "could not write the checkpoint of iteration 3; earlier checkpoints are kept"
        in result.output
    )
    assert "the last lines of metrics.jsonl NOT WRITTEN" in result.output
    assert run.checkpoints() == ["000001"] and len(run.metrics()) == 1
    assert run.start(max_steps=3).code == 0
    assert run.metrics() == uninterrupted.metrics()[:3]


# --- scorers and clocks ---------------------------------------------------------------------------


class Unreliable(Redness):
    """Is slow in iteration 2, fails in iteration 3 and returns NaN in iteration 4, each for one of
    two batches.
    """

    number = 0

    def score(self, videos, prompts, *, fps):
        self.number += 1
        scores = super().score(videos, prompts, fps=fps)
        if self.number == 4:
            time.sleep(0.5)
        if 6 <= self.number <= 9:  # the batch, its retry, and each of its videos
            raise ConnectionError("killed")
        return [scores[0] | {"VQ": math.nan}, *scores[1:]] if self.number == 11 else scores


def history(config, mesh, scorer, iterations):
    trainer = Trainer(config, mesh, CPU, scorers={"test": scorer})
    return train_iterations(trainer, iterations)


@pytest.mark.slow
def test_a_slow_scorer_changes_no_reward_and_a_failing_one_loses_only_its_own_rewards(
    tiny_config, mesh
):
    config = tiny_config.with_settings(**SETTINGS, lora_rank=2, max_missing_fraction=0.5)
    lines = history(config, mesh, Unreliable(), 4)
    assert [line["reward/missing"] for line in lines] == ["0.0", "0.0", "2.0", "1.0"]
    assert lines[:2] == history(config, mesh, Redness(), 2)
    assert all(math.isfinite(float(line["loss/total"])) for line in lines)


@pytest.mark.slow
def test_clocks_that_jump_do_not_change_the_results(tiny_config, mesh, monkeypatch):
    config = tiny_config.with_settings(**SETTINGS, lora_rank=2)
    expected = history(config, mesh, Redness(), 2)
    jumps = cycle((1e9, -1e9, 0.0, 3600.0))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    assert history(config, mesh, Redness(), 2) == expected


# --- the end of the rank that hangs ---------------------------------------------------------------


@pytest.mark.parametrize(
    "stage",
    [
        stage if stage == "anchor" else pytest.param(stage, marks=pytest.mark.slow)
        for stage in STAGES
    ],
)
def test_a_rank_that_hangs_is_reported_with_its_stage_ended_and_the_run_resumed(
    tmp_path, stage, hanging
):
    run, launcher = hanging if stage == "anchor" else start_with_hanging_rank(tmp_path, stage)
    code = launcher.wait(timeout=300)
    output = (run.log.parent / "output").read_text()
    assert code == 0, output
    # Rank 1 is stopped, so it prints nothing; rank 0 waits for it in this or a later stage.
    assert re.search(r"watchdog: rank 0 .* has been in stage .* of iteration 2 for 3 s", output)
    assert re.search(r"rank 0 .* ends in stage .* of iteration 2: ", output), output
    assert "resuming from iteration 1" in output
    assert [line["iteration"] for line in run.metrics()] == [1, 2] and run.checkpoints() == [
        "000001",
        "000002",
    ]
