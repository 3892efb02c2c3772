"""Tests of faults on one of two ranks: both ranks react at once and in the same way."""

import dataclasses
import hashlib
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import launch
from tests.shallow import SHALLOW
from tests.test_trainer import TIMING, Redness

pytestmark = pytest.mark.system

MODULE = "tests.distributed.test_rank_faults"
CPU = torch.device("cpu")
SETTINGS = {
    "pretrained_model_root": SHALLOW,
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
    "timeout": 60.0,
}
FSDP = {"enable_fsdp": True}
NAN = float("nan")


def make(folder, mesh, **settings):
    from hyvideo.settings.command_line import load_config
    from hyvideo.trainer import Trainer

    config = load_config("configs/smoke.yaml", output_dir=str(folder), **SETTINGS | settings)
    return Trainer(config, mesh, CPU, scorers={"test": Redness()})


def newest(folder):
    return max(path.name for path in (folder / "checkpoints").iterdir())


def start():
    from hyvideo.distributed import mesh as ranks

    return ranks.start(1, CPU, timeout=60.0)


def run_cases(folder):
    """Return what this rank observed, by case."""
    mesh, folder = start(), Path(folder)
    bad_numbers = ("reward", "loss", "gradient fsdp")
    return {
        "uninterrupted": train(folder / "uninterrupted", mesh),
        "unreadable": resume_unreadable(folder / "uninterrupted", mesh),
        "replaced": replace_owner(folder / "replaced", mesh),
        "foreign metrics": start_with_foreign_metrics(folder / "lines", mesh),
        "signal": stop_and_resume(folder / "signal", mesh),
        **{case: plant_nan(folder / case, mesh, case) for case in bad_numbers},
        "equal rewards": give_equal_rewards(folder / "equal", mesh),
        "full disk": fill_disk(folder / "full", mesh),
        "too many": exceed_max_bad_updates(folder / "many", mesh),
    }


def train(folder, mesh, **settings):
    trainer = make(folder, mesh, **settings)
    trainer.train()
    return digest(trainer)


def digest(trainer):
    """Return a hash of all tensors that this rank holds."""
    from hyvideo.distributed.sharded_tensors import local_shard

    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(trainer.run.policy.tensors().items()):
        found.update(name.encode())
        found.update(local_shard(tensor).contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def resume_unreadable(folder, mesh):
    """Return the error if only rank 1 cannot read the checkpoint's metadata."""
    from hyvideo.checkpoints import reader

    read = reader.read_shapes

    def raise_read_error(path):
        if mesh.rank == 1:
            raise ValueError("the disk does not answer")
        return read(path)

    reader.read_shapes = raise_read_error
    try:
        make(folder, mesh, max_steps=4)
    except ValueError as error:
        return str(error)
    finally:
        reader.read_shapes = read


def replace_owner(folder, mesh):
    """Return the error and the files if the lease is lost in the second iteration."""
    from hyvideo.files.run_folder import LEASE, NotOwner

    trainer = make(folder, mesh, save_asynchronously=False)
    run_iteration = trainer.run_iteration

    def run():
        if mesh.is_main and trainer.iteration == 2:
            (folder / LEASE).unlink()
        return run_iteration()

    trainer.run_iteration = run
    try:
        trainer.train()
    except NotOwner as error:
        remaining = [path.name for path in sorted((folder / "checkpoints").iterdir())]
        lines = (folder / "metrics.jsonl").read_text().count("\n")
        return {"error": str(error), "remaining": remaining, "lines": lines}


def start_with_foreign_metrics(folder, mesh):
    """Return the error if the folder contains another run's metrics, which only the main rank
    reads.
    """
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text('{"iteration": 1}\n')
    try:
        make(folder, mesh)
    except ValueError as error:
        return str(error)


def stop_and_resume(folder, mesh):
    """Send SIGTERM to rank 1 while it samples its second batch of the second iteration, then
    resume.
    """
    from hyvideo.training.preemption import Stopped

    trainer, sampled, stopped = make(folder, mesh), [], ""

    def counted(trainer):
        def sample(
            iteration, schedule, indices, conditions, sample=trainer.run.source.sample, **options
        ):
            sampled.append([iteration, indices[0].group])
            rollout = sample(iteration, schedule, indices, conditions, **options)
            if len(sampled) == 4 and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return rollout

        trainer.run.source.sample = sample
        return trainer

    try:
        counted(trainer).train()
    except Stopped as error:
        stopped = str(error)
    last = newest(folder)
    again = counted(make(folder, mesh))
    again.train()
    return {"stopped": stopped, "last": last, "sampled": sampled, "digest": digest(again)}


def fill_disk(folder, mesh):
    """Let rank 1 write nothing in the second iteration; return the failed saves and the
    checkpoints.
    """
    trainer = make(folder, mesh, save_asynchronously=False)
    run_iteration, save, failed = trainer.run_iteration, trainer.run.state.save, []

    def run():
        is_full = mesh.rank == 1 and trainer.iteration == 2
        resource.setrlimit(
            resource.RLIMIT_FSIZE,
            (0 if is_full else resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        )
        return run_iteration()

    def watched():
        save()
        failed.append(trainer.run.state.checkpoints.last_failed)

    trainer.run_iteration, trainer.run.state.save = run, watched
    trainer.train()
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return {"failed": failed, "names": names, "digest": digest(trainer)}


def plant_nan(folder, mesh, case):
    """Return the metrics of an iteration with a non-finite number on rank 1 and of the next, and
    what was skipped.
    """
    is_hit = mesh.rank == 1
    trainer = make(folder, mesh, max_missing_fraction=0.5, **(FSDP if "fsdp" in case else {}))
    terms, average = trainer.run.objective.terms, trainer.run.update._step
    hits = []

    def bad_terms(*arguments, **options):
        found = terms(*arguments, **options)
        if is_hit and case == "loss" and not hits:
            hits.append(1)
            metrics = {name: value * NAN for name, value in found.metrics.items()}
            return dataclasses.replace(
                found, loss=found.loss * NAN, deviation=found.deviation * NAN, metrics=metrics
            )
        return found

    def bad_gradient(*arguments):
        if is_hit and case.startswith("gradient") and not hits:
            hits.append(1)
            next(p for p in trainer.run.policy.parameters if p.grad is not None).grad.mul_(NAN)
        return average(*arguments)

    class FaultyScorer(Redness):
        def score(self, videos, prompts, *, fps):
            scores = super().score(videos, prompts, fps=fps)
            return (
                [s | {"VQ": NAN} for s in scores]
                if is_hit and case == "reward" and trainer.iteration == 1
                else scores
            )

    trainer.run.scorer.scorers["test"] = FaultyScorer()
    trainer.run.objective.terms, trainer.run.update._step = bad_terms, bad_gradient
    record, skipped = trainer.run.update.nonfinite.record_skipped, []
    trainer.run.update.nonfinite.record_skipped = lambda **found: (
        skipped.append(found["ranks"]),
        record(**found),
    )
    lines = []
    for _ in range(2):
        trainer.iteration += 1
        metrics = trainer.run_iteration()
        lines.append(
            {
                name: repr(v)
                for name, v in metrics.items()
                if not name.startswith((*TIMING, "cost/"))
            }
        )
    whole = "" if "fsdp" in case else digest(trainer)
    return {
        "lines": lines,
        "digest": whole,
        "updates": trainer.run.update.update_count,
        "skipped": skipped,
    }


def give_equal_rewards(folder, mesh):
    """Give equal rewards on rank 0 in the first iteration, and on both ranks in the second."""

    class Equal(Redness):
        def score(self, videos, prompts, *, fps):
            return [{"VQ": 1.0, "MQ": 1.0, "TA": 1.0} for _ in videos]

    settings = {"batch_size": 2, "gradient_accumulation_steps": 1, "num_updates_per_rollout": 1}
    trainer = make(folder, mesh, **settings)
    lines = []
    for trainer.iteration in (1, 2):
        if mesh.rank == 0 or trainer.iteration == 2:
            trainer.run.scorer.scorers["test"] = Equal()
        metrics = trainer.run_iteration()
        lines.append(
            [metrics["update"], metrics["update/without_signal"], metrics["advantage/zero_groups"]]
        )
        trainer.run.policy.anchor.age = 0  # as after a refresh
    return {"lines": lines, "digest": digest(trainer)}


def exceed_max_bad_updates(folder, mesh):
    """Make every update non-finite on rank 1; return the error and whether the policy is
    unchanged.
    """
    trainer = make(folder, mesh, max_bad_updates=3, save_interval=9)
    before = digest(trainer)
    step = trainer.run.update._step

    def bad(*arguments):
        if mesh.rank == 1:
            trainer.run.policy.parameters[0].grad = torch.full_like(
                trainer.run.policy.parameters[0], NAN
            )
        return step(*arguments)

    trainer.run.update._step = bad
    try:
        trainer.train()
    except FloatingPointError as error:
        return {
            "error": str(error),
            "iteration": trainer.iteration,
            "same": digest(trainer) == before,
        }
    return {}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch(f"{MODULE}:run_cases", 2, str(tmp_path_factory.mktemp("cases")), timeout=300)


def test_a_read_error_on_one_rank_stops_all_ranks_with_its_message(results):
    assert [rank["unreadable"] for rank in results] == ["the disk does not answer"] * 2


def test_a_process_that_loses_its_folder_stops_on_all_ranks_and_writes_nothing_more(results):
    for rank in results:
        result = rank["replaced"]
        assert ".lease" in result["error"]
        assert result["remaining"] == ["000001"] and result["lines"] == 1


def test_a_folder_with_the_metrics_of_another_run_raises_an_error_on_all_ranks(results):
    for rank in results:
        assert "metrics.jsonl" in rank["foreign metrics"]


def test_a_signal_to_one_rank_stops_all_and_the_iteration_is_repeated(results):
    for number, rank in enumerate(results):
        result = rank["signal"]
        assert ("SIGTERM" if number == 1 else "a signal to another rank") in result["stopped"]
        assert result["last"] == "000001" and len(result["sampled"]) == 8, result
        assert result["digest"] == rank["uninterrupted"]


def test_a_full_disk_on_one_rank_loses_only_one_checkpoint(results):
    for rank in results:
        assert rank["full disk"]["failed"] == [False, True, False]
        assert rank["full disk"]["names"] == ["000001", "000003"]
        assert rank["full disk"]["digest"] == rank["uninterrupted"]


@pytest.mark.parametrize("case", ["loss", "gradient fsdp"])
def test_both_ranks_skip_an_update_that_is_not_finite_on_one(results, case):
    first, second = (rank[case] for rank in results)
    assert first["lines"] == second["lines"] and first["digest"] == second["digest"]
    assert [line["update/skipped"] for line in first["lines"]] == ["1.0", "0.0"]
    assert first["updates"] == second["updates"] == 3
    # ranks with non-finite ratios
    assert first["skipped"] == second["skipped"] == [[1] if case == "loss" else []]


def test_a_reward_that_fails_on_one_rank_is_missing_on_both(results):
    first, second = (rank["reward"] for rank in results)
    assert first["lines"] == second["lines"] and first["digest"] == second["digest"]
    assert [line["reward/missing"] for line in first["lines"]] == ["2.0", "0.0"]
    assert [line["update/skipped"] for line in first["lines"]] == ["0.0", "0.0"]


def test_ranks_decide_together_whether_an_update_has_a_signal(results):
    first, second = (rank["equal rewards"] for rank in results)
    assert first == second and first["lines"] == [[1, 0.0, 1.0], [1, 1.0, 2.0]]


def test_too_many_bad_updates_stop_both_ranks_with_the_last_good_policy(results):
    for rank in results:
        result = rank["too many"]
        assert "max_bad_updates" in result["error"] and result["iteration"] == 2 and result["same"]
