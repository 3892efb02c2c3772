"""Two ranks: what breaks on one is known to both, at once and alike."""

import dataclasses
import hashlib
import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import launch
from tests.forked import ROOT, python
from tests.test_trainer import TIMING, Redness

MODULE = "tests.distributed.test_rank_faults"
CPU = torch.device("cpu")
SETTINGS = {
    "valid_video_csv": "",
    "report_to": ["none"],
    "cfg_scale": 1.0,
    "batch_size": 1,
    "gradient_accumulation_steps": 2,
    "num_generations": 2,
    "grpo_sampling_steps": 3,
    "num_updates_per_rollout": 2,
    "mini_batch_size_per_update": 2,
    "learning_rate": 1e-3,
    "lora_rank": 2,
    "update_ref_model_step": 6,
    "log_video_interval": 0,
    "num_threads": 1,
    "max_steps": 3,
    "save_interval": 1,
    "collective_timeout": 60.0,
}
FSDP = {"enable_fsdp": True}
NAN = float("nan")
BAD_NUMBERS = ("reward", "memory", "loss", "gradient", "gradient fsdp")


def make(folder, mesh, **settings):
    from hyvideo.config.command_line import load_config
    from hyvideo.trainer import Trainer

    config = load_config("configs/smoke.yaml", output_dir=str(folder), **SETTINGS | settings)
    return Trainer(config, mesh, CPU, scorers={"test": Redness()})


def start():
    from hyvideo.distributed import mesh as ranks

    return ranks.start(1, CPU, timeout=60.0)


# --- a rank that is killed ------------------------------------------------------------------------------------------


def train_and_lose_a_rank(folder):
    """The second rank is killed in the third iteration, as it makes the anchor's means."""
    mesh = start()
    trainer = make(folder, mesh)
    anchor_means = trainer.update.anchor_means

    def killed(rollouts):
        if trainer.iteration == 3 and mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return anchor_means(rollouts)

    trainer.update.anchor_means = killed
    trainer.train()


@pytest.fixture(scope="module")
def lost_rank(tmp_path_factory):
    """Folder of a run that lost a rank, what was said, exit code and seconds."""
    folder = tmp_path_factory.mktemp("lost") / "run"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    target = [f"{MODULE}:train_and_lose_a_rank", json.dumps([str(folder)]), str(folder.parent)]
    command = [python(), *launcher, "-m", "tests.distributed.launch", *target]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON_EXEC": python()}
    began = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=200)
    return folder, result, time.monotonic() - began


def test_the_others_end_soon_after_a_rank_was_killed_and_it_is_named(lost_rank):
    folder, result, seconds = lost_rank
    assert result.returncode != 0 and seconds < 120
    assert "Signal 9 (SIGKILL)" in result.stderr and "rank      : 1" in result.stderr
    assert (folder / "checkpoints" / "latest").read_text().strip() in ("000001", "000002")


# --- one launch for all that does not kill --------------------------------------------------------------------------


def play(folder, lost):
    """What this rank saw, by case."""
    mesh, folder = start(), Path(folder)
    return {
        "unbroken": train(folder / "unbroken", mesh),
        "lost rank": train(lost, mesh, resume_from_checkpoint="latest"),
        "apart": resume_apart(folder / "unbroken", mesh),
        "unreadable": resume_unreadable(folder / "unbroken", mesh),
        "superseded": supersede(folder / "superseded", mesh),
        "turns": turns_to_wait(folder / "silent", mesh),
        "lines of another": refuse_records(folder / "lines", mesh),
        "signal": leave_and_go_on(folder / "signal", mesh),
        **{
            case: plant_nan(folder / case, mesh, case)
            for case in ("reward", "memory", "loss", "gradient", "gradient fsdp")
        },
        "full disk": fill_disk(folder / "full", mesh),
        "too many": too_many(folder / "many", mesh),
    }


def train(folder, mesh, **settings):
    trainer = make(folder, mesh, **settings)
    trainer.train()
    return digest(trainer)


def digest(trainer):
    """Of all that this rank holds, to the bit."""
    from hyvideo.distributed.sharded_tensors import local

    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(trainer.policy.tensors().items()):
        found.update(name.encode())
        found.update(local(tensor).contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def resume_apart(folder, mesh):
    """What is said where rank 1 has taken up the first checkpoint, and rank 0 the newest."""
    from hyvideo.distributed import checkpoint

    find = checkpoint.find_undamaged

    def find_apart(*arguments):
        return find(*arguments).with_name("000003" if mesh.is_main else "000001")

    checkpoint.find_undamaged = find_apart
    try:
        make(folder, mesh, resume_from_checkpoint="latest", max_steps=4)
    except ValueError as error:
        return str(error)
    finally:
        checkpoint.find_undamaged = find


def resume_unreadable(folder, mesh):
    """What is said where rank 1 alone cannot read what the checkpoint has."""
    from hyvideo.training import policy

    read = policy.read_shapes

    def read_badly(path):
        if mesh.rank == 1:
            raise ValueError("the disk does not answer")
        return read(path)

    policy.read_shapes = read_badly
    try:
        make(folder, mesh, resume_from_checkpoint="latest", max_steps=4)
    except ValueError as error:
        return str(error)
    finally:
        policy.read_shapes = read


def supersede(folder, mesh):
    """Another life takes the folder in the second iteration: what ends this one, and what it has left."""
    from hyvideo.distributed.ownership import NotOwner

    trainer = make(folder, mesh, save_asynchronously=False)
    run_iteration = trainer.run_iteration

    def run(writer=None):
        if mesh.is_main and trainer.iteration == 2:
            (folder / ".owner").write_text('{"life": "later"}')
        return run_iteration(writer)

    trainer.run_iteration = run
    try:
        trainer.train()
    except NotOwner as error:
        left = [path.name for path in sorted((folder / "checkpoints").iterdir())]
        lines = (folder / "metrics.jsonl").read_text().count("\n")
        return {"told": str(error), "left": left, "lines": lines, "owner": (folder / ".owner").read_text()}


def turns_to_wait(folder, mesh):
    """The messages between ranks while a life is silent that only the main rank knows of."""
    from hyvideo.distributed import ownership

    anywhere, turns = ownership.anywhere, []
    ownership.anywhere = lambda *claim: (turns.append(1), anywhere(*claim))[1]
    try:
        folder.mkdir(exist_ok=True)
        if mesh.is_main:
            (folder / ".owner").write_text("{}")
        with ownership.Ownership(folder, mesh, beat_s=0.5, silence_s=0.5):
            return len(turns)
    finally:
        ownership.anywhere = anywhere


def refuse_records(folder, mesh):
    """What is said where the folder has another run's metrics when training begins, which only the main rank reads."""
    from hyvideo.distributed.ownership import NotOwner

    trainer = make(folder, mesh)
    (folder / "metrics.jsonl").write_text('{"iteration": 1}\n')
    try:
        trainer.train()
    except NotOwner as error:  # whose exit code is 2
        return str(error)


def leave_and_go_on(folder, mesh):
    """Rank 1 alone is asked to leave while it samples its second batch of the second iteration."""
    from hyvideo.training.preemption import Stopped

    trainer, sampled, ended = make(folder, mesh), [], ""

    def counted(trainer):
        def sample(iteration, indices, conditions, sample=trainer.collector.sample, **options):
            sampled.append([iteration, indices[0].group])
            rollout = sample(iteration, indices, conditions, **options)
            if len(sampled) == 4 and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return rollout

        trainer.collector.sample = sample
        return trainer

    try:
        counted(trainer).train()
    except Stopped as error:
        ended = str(error)
    last = (folder / "checkpoints" / "latest").read_text().strip()
    again = counted(make(folder, mesh, resume_from_checkpoint="latest"))
    again.train()
    return {"ended": ended, "last": last, "sampled": sampled, "digest": digest(again)}


def fill_disk(folder, mesh):
    """Rank 1 alone can write no byte in the second iteration: which saves failed, and which checkpoints there are."""
    trainer = make(folder, mesh, save_asynchronously=False)
    run_iteration, save, failed = trainer.run_iteration, trainer.state.save, []

    def run(writer=None):
        is_full = mesh.rank == 1 and trainer.iteration == 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if is_full else resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return run_iteration(writer)

    def watched():
        save()
        failed.append(trainer.checkpoints.last_failed)

    trainer.run_iteration, trainer.state.save = run, watched
    trainer.train()
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return {"failed": failed, "names": names, "digest": digest(trainer)}


def plant_nan(folder, mesh, case):
    """Metrics of an iteration with a number that is not finite on rank 1, and of the next."""
    is_hit = mesh.rank == 1
    trainer = make(folder, mesh, max_missing_fraction=0.5, **(FSDP if "fsdp" in case else {}))
    terms, average = trainer.update.terms, trainer.update._step
    hits = []

    def bad_terms(*arguments):
        found = terms(*arguments)
        if is_hit and case == "loss" and not hits:
            hits.append(1)
            return dataclasses.replace(found, loss=found.loss * NAN, ratio=found.ratio * NAN)
        return found

    def bad_gradient(*arguments):
        if is_hit and case.startswith("gradient") and not hits:
            hits.append(1)
            next(p for p in trainer.policy.parameters if p.grad is not None).grad.mul_(NAN)
        return average(*arguments)

    class Lying(Redness):
        def score(self, videos, prompts, *, fps):
            scores = super().score(videos, prompts, fps=fps)
            if is_hit and case == "memory" and trainer.iteration == 1:
                raise torch.OutOfMemoryError("no room on the GPU")
            return (
                [s | {"VQ": NAN} for s in scores] if is_hit and case == "reward" and trainer.iteration == 1 else scores
            )

    trainer.scorer.scorers["test"] = Lying()
    trainer.update.terms, trainer.update._step = bad_terms, bad_gradient
    lines = []
    for _ in range(2):
        trainer.iteration += 1
        metrics = trainer.run_iteration()
        lines.append({name: repr(v) for name, v in metrics.items() if not name.startswith((*TIMING, "cost/"))})
    whole = "" if "fsdp" in case else digest(trainer)
    dumps = sorted(path.name for path in (folder / "bad_updates").glob("*"))
    ranks = [json.loads(path.read_text())["ranks"] for path in sorted((folder / "bad_updates").glob("*.json"))]
    updates = trainer.update.update_count
    return {"lines": lines, "digest": whole, "updates": updates, "dumps": dumps, "ranks": ranks}


def too_many(folder, mesh):
    """Every update is bad on rank 1: what ends the run, and whether the policy is what it was."""
    trainer = make(folder, mesh, max_bad_updates=3)
    before = digest(trainer)
    step = trainer.update._step

    def bad(*arguments):
        if mesh.rank == 1:
            trainer.policy.parameters[0].grad = torch.full_like(trainer.policy.parameters[0], NAN)
        return step(*arguments)

    trainer.update._step = bad
    try:
        trainer.train()
    except FloatingPointError as error:
        return {"told": str(error), "iteration": trainer.iteration, "same": digest(trainer) == before}
    return {}


@pytest.fixture(scope="module")
def played(tmp_path_factory, lost_rank):
    return launch(f"{MODULE}:play", 2, str(tmp_path_factory.mktemp("play")), str(lost_rank[0]), timeout=300)


def test_a_run_that_lost_a_rank_goes_on_and_ends_as_the_unbroken_one(played):
    for rank in played:
        assert rank["lost rank"] == rank["unbroken"]


def test_ranks_that_took_up_different_checkpoints_all_stop_and_name_both(played):
    for rank in played:
        assert "that of iteration 3 with manifest" in rank["apart"] and "on rank 0" in rank["apart"]
        assert "that of iteration 1 with manifest" in rank["apart"] and "on rank 1" in rank["apart"]


def test_what_one_rank_cannot_read_stops_all_with_its_reason(played):
    assert [rank["unreadable"] for rank in played] == ["the disk does not answer"] * 2


def test_a_life_whose_folder_was_taken_stops_on_all_ranks_and_writes_no_more(played):
    for rank in played:
        seen = rank["superseded"]
        assert "another process of the run has taken" in seen["told"] and seen["owner"] == '{"life": "later"}'
        assert seen["left"] == ["000001", "latest"] and seen["lines"] == 1


def test_ranks_wait_in_step_for_a_life_that_is_silent(played):
    first, second = (rank["turns"] for rank in played)
    assert first == second > 3


def test_a_folder_with_the_metrics_of_another_run_is_refused_on_all_ranks(played):
    for rank in played:
        assert "contains the metrics of another run" in rank["lines of another"]


def test_a_signal_to_one_rank_is_a_signal_to_all_and_its_iteration_is_made_again(played):
    for number, rank in enumerate(played):
        seen = rank["signal"]
        assert ("SIGTERM" if number == 1 else "a signal to another rank") in seen["ended"]
        assert seen["last"] == "000001" and len(seen["sampled"]) == 8, seen
        assert seen["digest"] == rank["unbroken"]


def test_a_disk_that_is_full_on_one_rank_costs_both_the_checkpoint_and_nothing_else(played):
    for rank in played:
        assert rank["full disk"]["failed"] == [False, True, False]
        assert rank["full disk"]["names"] == ["000001", "000003", "latest"]
        assert rank["full disk"]["digest"] == rank["unbroken"]


@pytest.mark.parametrize("case", ["loss", "gradient", "gradient fsdp"])
def test_a_number_that_is_not_finite_on_one_rank_is_skipped_by_both(played, case):
    one, other = (rank[case] for rank in played)
    assert one["lines"] == other["lines"] and one["digest"] == other["digest"]
    assert [line["update/skipped"] for line in one["lines"]] == ["1.0", "0.0"]
    assert one["updates"] == other["updates"] == 3
    assert one["dumps"] == [f"000001-rank{n}.{kind}" for n in (0, 1) for kind in ("json", "safetensors")]
    assert one["ranks"] == ([[1], [1]] if case == "loss" else [[], []])  # whose ratios were no numbers


@pytest.mark.parametrize("case", ["reward", "memory"])
def test_a_reward_that_is_not_finite_or_has_no_memory_on_one_rank_is_missing_on_both(played, case):
    one, other = (rank[case] for rank in played)
    assert one["lines"] == other["lines"] and one["digest"] == other["digest"]
    assert [line["reward/missing"] for line in one["lines"]] == ["2.0", "0.0"]
    assert [line["update/skipped"] for line in one["lines"]] == ["0.0", "0.0"] and not one["dumps"]


def test_too_many_bad_updates_end_the_run_on_both_with_the_last_good_policy(played):
    for rank in played:
        seen = rank["too many"]
        assert "max_bad_updates" in seen["told"] and seen["iteration"] == 2 and seen["same"]
