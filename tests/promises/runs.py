"""Whole runs of post_train.py in new processes, with a fault, and the files that they leave."""

import json
import os
import resource
import signal
import subprocess
import time
from collections import Counter
from typing import NamedTuple

from hyvideo.records.metrics_file import complete_lines
from tests.forked import ROOT, python
from tests.shallow import SHALLOW

# The fault is injected in the new process before the program starts; the product has no code for
# it.
PROGRAM = """
import sys
import post_train
from hyvideo.settings import processes
from tests.promises import runs
runs.{}(*{})
processes.exit_on_signals()
sys.exit(post_train.main())
"""
STAGES = ("conditions", "rollout", "reward", "anchor", "update", "save")
SIGNALS = {name: signal.Signals[f"SIG{name}"] for name in ("KILL", "TERM", "INT", "STOP", "HUP")}
BATCHES = 2  # per iteration
SETTINGS = {
    "pretrained_model_root": SHALLOW,
    "batch_size": 2,
    "gradient_accumulation_steps": BATCHES,
    "num_generations": 2,
    "grpo_sampling_steps": 3,
    "num_updates_per_rollout": 2,
    "mini_batch_size_per_update": 2,
    "learning_rate": 1e-3,
    "kl_weight": 1e-2,
    "kl_schedule": "adaptive",
    "kl_warmup_updates": 2,
    "kl_target": 1e-4,
    "kl_strategy": "dual_moving",
    "update_ref_model_step": 6,
    "warmup_steps": 3,
    "num_threads": 1,
    "valid_video_csv": "",
    "cfg_scale": 1.0,
    "report_to": "none",
    "log_video_interval": 0,
    "max_steps": 3,
    "save_interval": 1,
    "save_total_limit": 0,
    "save_asynchronously": "false",
    "lora_rank": 2,  # small checkpoints; test_run_state.py covers the other kinds
    "ema_decay": 0.0,
}


def inject(log, stage="", iteration=0, kind="KILL", rank=0):
    """Send this process a signal in the middle of a stage of an iteration, and log every call of
    the sampler.

    Of several processes, only ``rank`` receives it.
    """
    import post_train
    from hyvideo.checkpoints import writer as checkpoint_writer

    build = post_train.build

    def build_faulty(*arguments):
        trainer = build(*arguments)
        if trainer is None:  # the run is finished
            return None

        def send_signals():
            if trainer.iteration == iteration and trainer.mesh.rank == rank:
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

        # a run on rated pairs samples nothing
        sample = getattr(trainer.run.source, "sample", None)

        def logged_sample(number, schedule, indices, conditions, sample=sample, **options):
            with open(log, "a") as file:
                print(number, indices[0].group, indices[0].member, file=file)
            rollout = sample(number, schedule, indices, conditions, **options)
            if stage == "rollout" and indices[0].group:  # in the second batch
                send_signals()
            return rollout

        trainer.run.source.sample = logged_sample
        trainer.run.source.encoder = faulty(trainer.run.encoder, stage == "conditions")
        for scorer in trainer.run.scorer.scorers.values():
            scorer.score = faulty(scorer.score, stage == "reward", number=2)
        trainer.run.objective.prepare = faulty(trainer.run.objective.prepare, stage == "anchor")
        trainer.run.update._step = faulty(trainer.run.update._step, stage == "update")
        checkpoint_writer.digest_files = faulty(checkpoint_writer.digest_files, stage == "save")
        return trainer

    post_train.build = build_faulty


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

        def run_with_limit():
            is_full = first <= trainer.iteration <= last
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (0 if is_full else resource.RLIM_INFINITY, -1)
            )
            return run_iteration()

        trainer.run_iteration = run_with_limit
        return trainer

    post_train.build = build_on_full_disk


def delete_lease(folder, iteration):
    """Delete the lease of the run's folder in an iteration, as if another process had taken it."""
    import post_train
    from hyvideo.files.run_folder import LEASE

    build = post_train.build

    def build_watched(*arguments):
        trainer = build(*arguments)
        run_iteration = trainer.run_iteration

        def run():
            if trainer.iteration == iteration:
                os.unlink(os.path.join(folder, LEASE))
            return run_iteration()

        trainer.run_iteration = run
        return trainer

    post_train.build = build_watched


def wait_in_iteration(iteration, waits, go):
    """Create the file ``waits`` in an iteration, and continue when the file ``go`` exists."""
    import post_train

    build = post_train.build

    def build_waiting(*arguments):
        trainer = build(*arguments)
        run_iteration = trainer.run_iteration

        def run():
            if trainer.iteration == iteration:
                open(waits, "w").close()
                while not os.path.exists(go):
                    time.sleep(0.05)
            return run_iteration()

        trainer.run_iteration = run
        return trainer

    post_train.build = build_waiting


def save_slowly(iteration, saving, seconds):
    """Create the file ``saving`` while a checkpoint is written, and wait."""
    from hyvideo.checkpoints import writer as checkpoint_writer

    digest_files = checkpoint_writer.digest_files

    def digest_slowly(folder, **share):
        if folder.name.split(".")[1] == f"{iteration:06d}":
            open(saving, "w").close()
            time.sleep(seconds)
        return digest_files(folder, **share)

    checkpoint_writer.digest_files = digest_slowly


def add_videos(folder):
    """Create a folder with a file of the user where the first videos will be written."""
    import post_train

    build = post_train.build

    def build_and_add(*arguments):
        trainer = build(*arguments)
        os.makedirs(os.path.join(folder, "rollouts", "000001"))
        open(os.path.join(folder, "rollouts", "000001", "mine"), "w").close()
        return trainer

    post_train.build = build_and_add


def without_times(metrics):
    return {k: v for k, v in metrics.items() if not k.startswith(("time/", "memory/", "perf/"))}


class Result(NamedTuple):
    code: int  # exit code, or minus the signal that killed the process
    output: str  # stdout and stderr


class Run:
    """A run of one or several processes, and its files."""

    def __init__(self, folder, **settings):
        self.out, self.log = folder / "run", folder / "sampled"
        self.settings = SETTINGS | {"output_dir": str(self.out)} | settings
        self.log.touch()

    def flags(self, **settings):
        flags = []
        for name, value in (self.settings | settings).items():
            flags += [f"--{name}", *value] if isinstance(value, list) else [f"--{name}={value}"]
        return flags

    def start(self, *fault, **settings):
        return self.start_with("inject", str(self.log), *fault, **settings)

    def command(self, function, *arguments, **settings):
        program = PROGRAM.format(function, arguments)
        flags = self.flags(**settings)
        return [python(), "-c", program, "--config", "configs/smoke.yaml", *flags]

    def start_with(self, function, *arguments, **settings):
        process = subprocess.run(
            self.command(function, *arguments, **settings),
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
        )
        return Result(process.returncode, process.stdout + process.stderr)

    def launch(self, function, *arguments, launcher=("-m", "scripts.launch"), flags=(), **settings):
        """Start two ranks with a launcher, whose process is returned; `output` has their output."""
        program = self.out.parent / "program.py"
        program.write_text(PROGRAM.format(function, arguments))
        command = [python(), *launcher, "--standalone", "--nproc_per_node=2", *flags, str(program)]
        command += ["--config", "configs/smoke.yaml", *self.flags(**settings)]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON_EXEC": python()}
        with open(self.out.parent / "output", "w") as output:
            return subprocess.Popen(
                command, stdout=output, stderr=output, cwd=ROOT, env=os.environ | environment
            )

    def output(self):
        return (self.out.parent / "output").read_text()

    def sampled(self):
        return [tuple(map(int, line.split())) for line in self.log.read_text().splitlines()]

    def metrics(self):
        lines = [json.loads(line) for _, line in complete_lines(self.out / "metrics.jsonl")]
        return [without_times(line) for line in lines]

    def names(self, parent="checkpoints"):
        return sorted(path.name for path in (self.out / parent).iterdir())

    def checkpoint(self, iteration):
        return self.out / "checkpoints" / f"{iteration:06d}"

    def saved(self, iteration):
        """Return the digests of a checkpoint's tensors and its state, which are equal if and only
        if the runs are.
        """
        files = json.loads((self.checkpoint(iteration) / "digests.json").read_text())
        state = json.loads((self.checkpoint(iteration) / "state.json").read_text())
        del state["settings"], state["run"]
        state["metrics"] = without_times(state["metrics"])
        return {name: entry for name, entry in files.items() if name.endswith(".distcp")}, state

    def files(self):
        return {path: path.read_bytes() for path in self.out.rglob("*") if path.is_file()}


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(content)
