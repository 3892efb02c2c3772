"""Tests that a run is the same on any number of ranks: rollouts, rewards, loss, gradients and
weights.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.launch import launch
from tests.shallow import SHALLOW

pytestmark = pytest.mark.system

MODULE = "tests.distributed.test_same_run"
CPU = torch.device("cpu")
SETTINGS = {
    "pretrained_model_root": SHALLOW,
    "valid_video_csv": "",
    "num_updates_per_rollout": 1,
    "mini_batch_size_per_update": 2,
    "learning_rate": 1e-3,
    # Adam divides by the gradient's magnitude, so rounding errors of tiny gradients become full
    # steps. This epsilon keeps such steps proportional to the gradient.
    "adam_epsilon": 1e-2,
    "log_video_interval": 0,
    "kl_strategy": "dual_fixed",
    "anchor_fraction": 0.5,  # 2 of 3 steps
    "kl_weight": 0.1,
    "kl_coef": 0.1,
    "kl_schedule": "constant",
    "ema_decay": 0.5,
    "max_missing_fraction": 0.6,
    "num_threads": 1,
    "seed": 52,
}
LORA = {"lora_rank": 3, "activation_checkpointing": "full"}
FSDP = {"enable_fsdp": True}
# World size and the settings with which it samples the same 8 rollouts.
LAYOUTS = {
    "dp 4, two accumulation steps": {"batch_size": 1, "gradient_accumulation_steps": 2},
    "dp 2 x sp 2": {"batch_size": 4, "sp_size": 2},
    "fsdp 2 x sp 2": {"batch_size": 4, "sp_size": 2, **FSDP, "activation_checkpointing": "full"},
    "fsdp 2 x sp 2, two model replicas, unbatched, reduced once, kept gathered, selective": {
        "batch_size": 4,
        "sp_size": 2,
        **FSDP,
        "dp_replicate": 2,
        "batched_forward": False,
        "reshard_after_forward": False,
        "activation_checkpointing": "selective",
    },
}
# The other layouts use subsets of its features; batched forward passes are covered by LoRA below.
ESSENTIAL = (
    # Some ranks have missing rewards: with batched forward passes, ranks would make different
    # numbers of calls.
    "fsdp 2 x sp 2, two model replicas, unbatched, reduced once, kept gathered, selective",
)
COMPARED = (
    "reward/mean",
    "reward/std",
    "reward/missing",
    "loss/policy",
    "loss/total",
    "kl/position",
    "policy/log_prob",
)


# Rewards are rounded to this quantum. With another batch shape, a kernel may round a pixel
# differently, which changes a reward by 3e-6. All rewards of these tests are at least 1e-4 away
# from a rounding boundary.
QUANTUM = 0.0025


class ThresholdScorer:
    """Scorer that rewards red minus blue; rewards below ``threshold`` are missing."""

    def __init__(self, threshold):
        self.threshold = threshold

    def score(self, videos, prompts, *, fps):
        values = [
            (video[:, 0].float() - video[:, 2].float()).mean().item() / 255 for video in videos
        ]
        values = [
            QUANTUM * round(value / QUANTUM) if value >= self.threshold else float("nan")
            for value in values
        ]
        return [{"VQ": value, "MQ": value, "TA": value} for value in values]

    def check_prompts(self, prompts):
        pass

    def held_out(self, videos, prompts):
        return {}


def save_tensors(path, tensors):
    """Save tensors that may be sharded, from the main rank.

    One message per rank is faster than one per tensor.
    """
    import torch.distributed as dist

    from hyvideo.distributed.sharded_tensors import local_shard

    shards = [{name: local_shard(tensor).contiguous().clone() for name, tensor in tensors.items()}]
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(shards[0], gathered)
        if dist.get_rank() > 0:
            return
        shards = gathered
    full = {}
    for name, tensor in tensors.items():
        # of a DTensor; its last dimension shards the first of the tensor
        mesh = getattr(tensor, "device_mesh", None)
        ranks = [0] if mesh is None else mesh.mesh.flatten()[: mesh.size(-1)].tolist()
        parts = [shards[rank][name] for rank in ranks]
        full[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
        assert full[name].shape == tensor.shape, name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(full, path)


def train(folder, settings, threshold):
    """Return the last metrics and a digest of this rank's rollouts; the main rank writes all
    tensors.
    """
    from hyvideo.distributed import mesh as ranks
    from hyvideo.settings.command_line import load_config
    from hyvideo.trainer import Trainer

    config = load_config(
        "configs/smoke.yaml", output_dir=str(Path(folder) / "run"), **SETTINGS | settings
    )
    mesh = ranks.start(
        config.distributed.sp_size, CPU, dp_replicate=config.distributed.dp_replicate
    )
    trainer = Trainer(config, mesh, CPU, scorers={"test": ThresholdScorer(threshold)})
    for _ in range(2):
        trainer.iteration += 1
        metrics = trainer.run_iteration()
    collector, indices = trainer.run.source, trainer.run.source.choose(1).indices
    conditions = trainer.run.encoder(collector.choose(trainer.iteration).requests)
    latents = collector.sample(trainer.iteration, collector.schedule, indices, conditions).final
    save_tensors(Path(folder) / "tensors.safetensors", trainer.run.policy.tensors())
    rollouts = {
        index.number(config.rollout.num_generations): row.double().sum().item()
        for index, row in zip(indices, latents)
    }
    return {"metrics": metrics, "rollouts": rollouts}


def train_all(folder, layouts, threshold):
    return {
        name: train(Path(folder) / name, settings, threshold) for name, settings in layouts.items()
    }


KINDS = {
    # Without guidance, and with two trained steps, one of them with the anchor.
    "full": {"cfg_scale": 1.0, "grpo_sampling_steps": 3, "seed": 87},
    # Two updates, so that the second has ratios other than 1; with two replicas, each trains a
    # group in each update.
    "lora": LORA | {"num_generations": 2, "num_updates_per_rollout": 2},
}


@pytest.fixture(scope="module", params=["full", pytest.param("lora", marks=pytest.mark.slow)])
def runs(request, tmp_path_factory):
    """Return the runs of one kind of training: on one process and in layouts of four."""
    folder, kind = tmp_path_factory.mktemp(request.param), KINDS[request.param]
    threshold = -0.2257  # some rewards are below it
    whole = kind | {"batch_size": 8}
    (single,) = launch(f"{MODULE}:train", 1, str(folder / "single"), whole, threshold)
    chosen = LAYOUTS if request.config.getoption("--slow") else ESSENTIAL
    if request.param == "lora":
        chosen = ("dp 2 x sp 2",)  # ranks that share videos also average gradients without FSDP
    settings = {name: kind | LAYOUTS[name] for name in chosen}
    ranks = launch(f"{MODULE}:train_all", 4, str(folder), settings, threshold, timeout=600)
    return folder, single, ranks


def by_step(metrics):
    """Return the metrics of the trained denoising steps."""
    names = ("by_step/kl", "by_step/ratio_mean", "by_step/ratio_max_deviation")
    return [value for name in names for value in metrics.get(name, []) if value is not None]


def test_every_layout_trains_the_same_as_one_process(runs):
    folder, single, ranks = runs
    expected = load_file(folder / "single" / "tensors.safetensors")
    for layout in ranks[0]:
        for rank in ranks:
            metrics = rank[layout]["metrics"]
            for name in [name for name in COMPARED if name in single["metrics"]]:
                assert metrics[name] == pytest.approx(
                    single["metrics"][name], rel=2e-5, abs=1e-6
                ), (layout, name)
            assert metrics["grad/norm"] == pytest.approx(
                single["metrics"]["grad/norm"], rel=1e-4
            ), layout
            assert metrics.get("policy/ratio_first_deviation", 0.0) <= 1e-6, layout
            assert by_step(metrics) == pytest.approx(
                by_step(single["metrics"]), rel=1e-3, abs=1e-6
            ), layout
        found = load_file(folder / layout / "tensors.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            deviation = (tensor - expected[name]).abs().max().item()
            assert deviation <= 1e-6, (layout, name, deviation)


def test_rollouts_are_bitwise_equal_within_a_replica_and_equal_across_layouts(runs):
    _, single, ranks = runs
    for layout in ranks[0]:
        sums = {}
        for rank in ranks:
            for number, value in rank[layout]["rollouts"].items():
                assert sums.setdefault(number, value) == value, (layout, number)
        assert sums.keys() == single["rollouts"].keys()
        for number, value in sums.items():
            assert value == pytest.approx(single["rollouts"][number], rel=1e-4, abs=1e-3), (
                layout,
                number,
            )


def test_some_rewards_were_missing_and_something_was_trained(runs):
    _, single, *_ = runs
    metrics = single["metrics"]
    assert 1 <= metrics["reward/missing"] <= 6 and metrics["grad/norm"] > 1e-3
