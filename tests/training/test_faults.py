"""Faults planted in every stage of a run: what is lost is made again, and the end is that of the unbroken run."""

import json
import math
import os
import resource
import signal
import subprocess
import time
from collections import Counter
from itertools import cycle
from typing import NamedTuple

import pytest

from hyvideo.records.metrics_file import whole_lines
from hyvideo.trainer import Trainer
from tests.forked import ROOT, python
from tests.test_trainer import CPU, Redness
from tests.training.test_run_state import SETTINGS, go_on

# A fault is planted in the new process before the program begins; the product knows nothing of it.
PROGRAM = """
import sys
import post_train
from tests.training import test_faults
test_faults.{}(*{})
sys.exit(post_train.main())
"""
STAGES = ("conditions", "rollout", "reward", "anchor", "update", "save")
FAULTY = {stage: number for number, stage in enumerate(STAGES, start=2)}  # the iteration in which it is hit
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
    "lora_rank": 2,  # small checkpoints; test_run_state.py has the other kinds
    "ema_decay": 0.0,
    "resume_from_checkpoint": "latest",
}
NUMBERS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "INT": signal.SIGINT}


def plant(notes, stage="", iteration=0, kind="KILL"):
    """Sends this process a signal in the middle of a stage of an iteration, and notes every call of the sampler."""
    import post_train
    from hyvideo.distributed import manifest

    build = post_train.build

    def build_faulty(*arguments):
        trainer = build(*arguments)

        def strike():
            if trainer.iteration == iteration:
                for name in kind.split():
                    os.kill(os.getpid(), NUMBERS[name])
                    time.sleep(0.05)  # of a second signal of the same kind

        calls = Counter()  # of each iteration

        def struck(function, is_this, number=1):
            def call(*arguments, **options):
                result = function(*arguments, **options)
                calls[function, trainer.iteration] += 1
                if is_this and calls[function, trainer.iteration] == number:
                    strike()
                return result

            return call

        def note(number, indices, conditions, sample=trainer.collector.sample, **options):
            with open(notes, "a") as file:
                print(number, indices[0].group, indices[0].member, file=file)
            rollout = sample(number, indices, conditions, **options)
            if stage == "rollout" and indices[0].group:  # in the second batch
                strike()
            return rollout

        trainer.collector.sample = note
        trainer.collector.encoder = struck(trainer.encoder, stage == "conditions")
        for scorer in trainer.scorer.scorers.values():
            scorer.score = struck(scorer.score, stage == "reward", number=2)
        trainer.update.anchor_means = struck(trainer.update.anchor_means, stage == "anchor")
        trainer.update._step = struck(trainer.update._step, stage == "update")
        manifest.hash_share = struck(manifest.hash_share, stage == "save")
        return trainer

    post_train.build = build_faulty


class Life(NamedTuple):
    code: int  # exit code; minus the signal that killed it
    told: str  # stdout and stderr


class Run:
    """A run of one life or many: what each left."""

    def __init__(self, folder):
        self.out, self.notes = folder / "run", folder / "sampled"
        self.notes.touch()

    def live(self, *fault, **settings):
        return self.live_with(plant, str(self.notes), *fault, **settings)

    def live_with(self, plant, *arguments, **settings):
        settings = RUN | {"output_dir": str(self.out)} | settings
        flags = [f"--{name}={value}" for name, value in settings.items()]
        program = PROGRAM.format(plant.__name__, arguments)
        command = [python(), "-c", program, "--config", "configs/smoke.yaml", *flags]
        life = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
        return Life(life.returncode, life.stdout + life.stderr)

    def sampled(self):
        return [tuple(map(int, line.split())) for line in self.notes.read_text().splitlines()]

    def metrics(self):
        lines = [json.loads(line) for _, line in whole_lines(self.out / "metrics.jsonl")]
        return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]

    def checkpoints(self):
        return sorted(path.name for path in (self.out / "checkpoints").iterdir() if path.name[0] == "0")

    def end(self, iteration=LAST):
        """Hashes of a checkpoint's tensors and its numbers: equal if and only if the runs are."""
        folder = self.out / "checkpoints" / f"{iteration:06d}"
        files = json.loads((folder / "manifest.json").read_text())
        state = json.loads((folder / "state.json").read_text())
        del state["settings"]
        return {name: entry for name, entry in files.items() if name.endswith(".distcp")}, state


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("unbroken"))
    life = run.live()
    assert life.code == 0, life.told
    assert len(run.sampled()) == LAST * BATCHES
    return run


@pytest.fixture(scope="module", params=["KILL", "TERM"])
def broken(request, tmp_path_factory):
    """One run in as many lives as there are stages to be struck in, and one more."""
    run = Run(tmp_path_factory.mktemp(request.param))
    codes, told, newest = {}, {}, {}
    for stage, iteration in FAULTY.items():
        life = run.live(stage, iteration, request.param)
        codes[stage], told[stage], newest[stage] = life.code, life.told, run.checkpoints()[-1]
    last = run.live()
    assert last.code == 0, last.told
    return request.param, run, codes, told, newest


def test_each_life_ends_as_it_was_struck_and_leaves_its_last_finished_iteration(broken):
    kind, _, codes, told, newest = broken
    for stage, iteration in FAULTY.items():
        assert codes[stage] == (-signal.SIGKILL if kind == "KILL" else 75), (stage, told[stage])
        # Updates and saves are ended before a run that is asked to leaves.
        is_finished = kind == "TERM" and stage in ("update", "save")
        assert newest[stage] == f"{iteration - (not is_finished):06d}", stage
        if kind == "TERM":
            assert "stop requested by SIGTERM" in told[stage] and "Traceback" not in told[stage], told[stage]


def test_a_run_of_many_lives_is_the_unbroken_one_bit_for_bit(broken, unbroken):
    _, run, *_ = broken
    assert run.metrics() == unbroken.metrics()
    assert run.end() == unbroken.end()
    assert not list((run.out / "checkpoints").glob(".*"))


def test_only_rollouts_of_the_iteration_under_way_are_made_again(broken, unbroken):
    kind, run, *_ = broken
    again = {iteration for iteration, *_ in (sample for sample in run.sampled() if run.sampled().count(sample) > 1)}
    # In the stage of the conditions nothing was sampled yet; updates and saves are ended before a run leaves.
    stages = STAGES[1:] if kind == "KILL" else STAGES[1:-2]
    assert again == {FAULTY[stage] for stage in stages}
    assert set(run.sampled()) == set(unbroken.sampled())


def test_ctrl_c_twice_leaves_at_once_and_once_after_the_stage(unbroken, tmp_path):
    run = Run(tmp_path)
    life = run.live("rollout", 2, "INT INT", max_steps=3)
    assert life.code == 130 and "Ctrl-C twice ends it at once" in life.told
    assert run.checkpoints() == ["000001"]
    life = run.live("update", 2, "INT", max_steps=3)
    assert life.code == 75 and run.checkpoints() == ["000001", "000002"]
    assert run.metrics() == unbroken.metrics()[:2]


# --- a full disk ----------------------------------------------------------------------------------------------------


def fill_disk(first, last):
    """From the one iteration to the other no file takes a byte more, whoever writes; stdout and stderr are pipes."""
    import post_train

    pipe = subprocess.Popen(["cat"], stdin=subprocess.PIPE).stdin.fileno()
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)
    build = post_train.build

    def build_on_full_disk(*arguments):
        trainer = build(*arguments)
        run_iteration = trainer.run_iteration

        def run_one(writer):
            is_full = first <= trainer.iteration <= last
            resource.setrlimit(resource.RLIMIT_FSIZE, (0 if is_full else resource.RLIM_INFINITY, -1))
            return run_iteration(writer)

        trainer.run_iteration = run_one
        return trainer

    post_train.build = build_on_full_disk


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(unbroken, tmp_path):
    run = Run(tmp_path)
    life = run.live_with(fill_disk, 2, 3, log_video_interval=2, report_to="tensorboard", max_steps=4)
    assert life.code == 0, life.told
    assert run.checkpoints() == ["000001", "000004"]
    for said in (
        "CHECKPOINT NOT WRITTEN",
        "METRICS NOT WRITTEN YET",
        "VIDEOS OF",
        "TensorBoardReport DISABLED",
    ):
        assert said in life.told, life.told
    assert "File too large" in life.told and "earlier ones are kept, training goes on" in life.told
    assert run.metrics() == unbroken.metrics()[:4] and run.end(4) == unbroken.end(4)
    assert not list((run.out / "checkpoints").glob(".*"))


def test_a_run_whose_last_checkpoint_is_not_written_fails_and_is_gone_on_with(unbroken, tmp_path):
    run = Run(tmp_path)
    life = run.live_with(fill_disk, 2, LAST, max_steps=3)
    assert life.code == 1 and "the checkpoint of iteration 3 could not be written; earlier ones are kept" in life.told
    assert "METRICS LOST: 2 lines" in life.told
    assert run.checkpoints() == ["000001"] and len(run.metrics()) == 1
    assert run.live(max_steps=3).code == 0
    assert run.metrics() == unbroken.metrics()[:3]


# --- scorers and clocks ---------------------------------------------------------------------------------------------


class Unreliable(Redness):
    """Is slow in the second iteration, is gone in the third and lies in the fourth; each time of a batch of two."""

    number = 0

    def score(self, videos, prompts, *, fps):
        self.number += 1
        scores = super().score(videos, prompts, fps=fps)
        if self.number == 4:
            time.sleep(0.5)
        if 6 <= self.number <= 9:  # the batch, once more, and each of its videos
            raise ConnectionError("killed")
        return [scores[0] | {"VQ": math.nan}, *scores[1:]] if self.number == 11 else scores


def history(config, mesh, scorer, iterations):
    trainer = Trainer(config, mesh, CPU, scorers={"test": scorer})
    return go_on(trainer, iterations)


def test_a_scorer_that_is_slow_costs_time_and_one_that_is_gone_or_lies_its_own_rewards(tiny_config, mesh):
    config = tiny_config.with_settings(**SETTINGS, lora_rank=2, max_missing_fraction=0.5)
    lines = history(config, mesh, Unreliable(), 4)
    assert [line["reward/missing"] for line in lines] == ["0.0", "0.0", "2.0", "1.0"]
    assert lines[:2] == history(config, mesh, Redness(), 2)
    assert all(math.isfinite(float(line["loss/total"])) for line in lines)


def test_clocks_that_jump_change_nothing(tiny_config, mesh, monkeypatch):
    config = tiny_config.with_settings(**SETTINGS, lora_rank=2)
    expected = history(config, mesh, Redness(), 2)
    jumps = cycle((1e9, -1e9, 0.0, 3600.0))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    assert history(config, mesh, Redness(), 2) == expected
