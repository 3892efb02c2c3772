"""Short runs on the GPU: default settings, comparison with the CPU, resume, and collectives with one rank."""

import statistics

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hyvideo.config.command_line import load_config
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import parallelize
from hyvideo.models.family import install
from hyvideo.trainer import Trainer
from scripts import first_run
from tests.conftest import ROOT
from tests.cuda.speed import Workload, forward
from tests.cuda.workload import TINY_MODEL
from tests.shallow import SHALLOW

pytestmark = pytest.mark.cuda
QUICK = {"batch_size": 4, "grpo_sampling_steps": 2, "num_updates_per_rollout": 1, "pretrained_model_root": SHALLOW}
AS_CPU = {"batched_forward": True, "enable_compile": False}
# The settings with which run_post_train.sh trains the miniature on a GPU.
MINIATURE_ON_GPU = {name: value for name, value in first_run.ON_GPU.items() if name != "device"}
MINIATURE_ON_GPU["mini_batch_size_per_update"] = int(MINIATURE_ON_GPU["mini_batch_size_per_update"])


@pytest.fixture
def trainer_of(gpu, mesh, tmp_path, monkeypatch):
    """A function that creates a trainer which writes no videos; on the CPU its iterations are short."""
    monkeypatch.chdir(ROOT)

    def make(config_file, device, **settings):
        common = {"output_dir": str(tmp_path / "run"), "log_video_interval": 0, "valid_video_csv": ""}
        settings = common | settings | (QUICK if gpu.type == "cpu" else {})
        return Trainer(load_config(config_file, device=device.type, **settings), mesh, device)

    return make


def iterations(trainer, number):
    lines = []
    for _ in range(number):
        trainer.iteration += 1
        lines.append(trainer.run_iteration())
    return lines


def test_smoke(gpu, trainer_of, record_property):
    """GPU defaults: bf16, one call per sample and branch, compiled blocks, activation checkpointing."""
    trainer = trainer_of(
        "configs/smoke.yaml", gpu, dtype="bf16", batched_forward=False, enable_gradient_checkpointing=True
    )
    for line in iterations(trainer, 2):  # includes the on-policy check
        record_property("max |ratio - 1|", line["policy/ratio_max_deviation"])
        record_property("seconds each", line["time/iteration"])


def test_the_reward_curve_of_the_miniature_matches_the_cpu(gpu, trainer_of, record_property):
    file, number = ("configs/miniature.yaml", 20) if gpu.type == "cuda" else ("configs/smoke.yaml", 1)
    last = []
    for device in (gpu, torch.device("cpu")):
        trainer = trainer_of(file, device, **MINIATURE_ON_GPU)
        lines = iterations(trainer, number)
        rewards = [line["reward/mean"] for line in lines]
        last.append(statistics.mean(rewards[-5:]))
        record_property(f"reward {len(last)}", " ".join(f"{reward:.3f}" for reward in rewards))
        record_property(f"seconds each {len(last)}", statistics.median(line["time/iteration"] for line in lines))
    # Three standard errors of the difference between runs with independent noise.
    noise = 3 * lines[-1]["reward/std"] * (2 / (len(rewards[-5:]) * trainer.plan.rollouts)) ** 0.5
    assert abs(last[0] - last[1]) <= noise


def test_resume(gpu, trainer_of, record_property):
    """Bit-identical with CHECK_DETERMINISTIC; otherwise the difference is recorded. Also records the seconds."""
    settings = AS_CPU | {"save_asynchronously": False}
    uninterrupted = trainer_of("configs/smoke.yaml", gpu, **settings)
    lines = iterations(uninterrupted, 1)
    saved = str(uninterrupted.state.save())
    lines += iterations(uninterrupted, 1)
    resumed = trainer_of("configs/smoke.yaml", gpu, resume_from_checkpoint=saved, **settings)
    lines += iterations(resumed, 1)
    ours, theirs = resumed.policy.tensors(), uninterrupted.policy.tensors()
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    record_property("deterministic", is_deterministic)
    record_property("bit for bit", same)
    record_property("apart", max((ours[name] - value).abs().max().item() for name, value in theirs.items()))
    record_property("seconds each", statistics.median(line["time/iteration"] for line in lines))
    assert same or not is_deterministic


def test_one_rank_by_nccl(gpu):
    """Uses gloo on the CPU."""
    device = torch.device("cuda", 0) if gpu.type == "cuda" else gpu
    backend, options = ("cpu:gloo,cuda:nccl", {"device_id": device}) if gpu.type == "cuda" else ("gloo", {})
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        number = torch.ones(3, device=device)
        dist.all_reduce(number)
        assert number.tolist() == [1, 1, 1]
        work = Workload(device, torch.float32, TINY_MODEL, (2, 4, 4), 8)
        inputs = work.inputs(work.transformer())["ours"]
        shards = init_device_mesh(gpu.type, (1,), mesh_dim_names=("shard",))
        norms = []
        for is_sharded in (False, True):
            model = work.transformer()
            install(model)
            parallelize(model, Mesh(rank=0, world_size=1, sp_size=1, shards=shards), shard=is_sharded)
            forward(model, inputs).square().mean().backward()
            norms.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item())
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    finally:
        dist.destroy_process_group()
