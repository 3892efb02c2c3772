"""Short runs on the GPU: default settings, every miniature config, comparison with the CPU, and
resume.
"""

import statistics

import pytest
import torch

from hyvideo.settings.command_line import load_config
from hyvideo.trainer import Trainer
from tests.conftest import ROOT
from tests.shallow import SHALLOW

pytestmark = pytest.mark.cuda
QUICK = {
    "batch_size": 4,
    "grpo_sampling_steps": 2,
    "num_updates_per_rollout": 1,
    "pretrained_model_root": SHALLOW,
}
FEW = {"batch_size": 4, "gradient_accumulation_steps": 1, "num_generations": 2}
AS_CPU = {"batched_forward": True, "enable_compile": False}
# Rollout and update use one batch of all 32 rollouts, so that both compute the same numbers. The
# blocks of the miniature run for milliseconds, and compiling them would take minutes.
MINIATURE_ON_GPU = {
    "batched_forward": "true",
    "mini_batch_size_per_update": 32,
    "enable_compile": "false",
}


@pytest.fixture
def trainer_of(gpu, mesh, tmp_path, monkeypatch):
    """A function that creates a trainer which writes no videos; on the CPU its iterations are
    short.
    """
    monkeypatch.chdir(ROOT)

    def make(config_file, device, quick=QUICK, **settings):
        common = {
            "output_dir": str(tmp_path / "run"),
            "log_video_interval": 0,
            "valid_video_csv": "",
        }
        settings = common | settings | (quick if gpu.type == "cpu" else {})
        return Trainer(load_config(config_file, device=device.type, **settings), mesh, device)

    return make


def iterations(trainer, number):
    lines = []
    for _ in range(number):
        trainer.iteration += 1
        lines.append(trainer.run_iteration())
    return lines


def test_smoke(gpu, trainer_of, record):
    """GPU defaults: bf16, one call per sample and branch, compiled blocks, activation
    checkpointing.
    """
    trainer = trainer_of(
        "configs/smoke.yaml",
        gpu,
        dtype="bf16",
        batched_forward=False,
        activation_checkpointing="auto",
    )
    for line in iterations(trainer, 2):  # includes the on-policy check
        record({"max |ratio - 1|": line["policy/ratio_max_deviation"]})
        record({"seconds each": line["time/iteration"]})


MINIATURES = sorted(path.stem for path in (ROOT / "configs").glob("miniature*.yaml"))


# dpo and sft need files of videos that other programs make
@pytest.mark.parametrize(
    "name", [name for name in MINIATURES if not name.endswith(("_dpo", "_sft"))]
)
def test_miniature(gpu, trainer_of, record, name):
    """One iteration of a miniature's config with the settings of run_post_train.sh for a GPU."""
    trainer = trainer_of(f"configs/{name}.yaml", gpu, FEW, **MINIATURE_ON_GPU)
    (line,) = iterations(trainer, 1)
    record({"s": line["time/iteration"], "reward": line.get("reward/mean")})
    assert line["update/skipped"] == 0


def test_the_reward_curve_of_the_miniature_matches_the_cpu(gpu, trainer_of, record):
    file, number = (
        ("configs/miniature.yaml", 20) if gpu.type == "cuda" else ("configs/smoke.yaml", 1)
    )
    last = []
    for device in (gpu, torch.device("cpu")):
        trainer = trainer_of(file, device, **MINIATURE_ON_GPU)
        lines = iterations(trainer, number)
        rewards = [line["reward/mean"] for line in lines]
        last.append(statistics.mean(rewards[-5:]))
        record({f"reward {len(last)}": " ".join(f"{reward:.3f}" for reward in rewards)})
        record(
            {
                f"seconds each {len(last)}": statistics.median(
                    line["time/iteration"] for line in lines
                )
            }
        )
    # Three standard errors of the difference between runs with independent noise.
    noise = (
        3
        * lines[-1]["reward/std"]
        * (2 / (len(rewards[-5:]) * trainer.run.inputs.plan.rollouts)) ** 0.5
    )
    assert abs(last[0] - last[1]) <= noise


def test_resume(gpu, trainer_of, record, tmp_path):
    """Bit-identical with CHECK_DETERMINISTIC; otherwise the difference is recorded.

    Also records the seconds.
    """
    settings = AS_CPU | {"save_asynchronously": False}
    uninterrupted = trainer_of("configs/smoke.yaml", gpu, **settings)
    lines = iterations(uninterrupted, 1)
    saved = str(uninterrupted.run.state.save())
    lines += iterations(uninterrupted, 1)
    settings |= {"resume_from_checkpoint": saved, "output_dir": str(tmp_path / "resumed")}
    resumed = trainer_of("configs/smoke.yaml", gpu, **settings)
    lines += iterations(resumed, 1)
    ours, theirs = resumed.run.policy.tensors(), uninterrupted.run.policy.tensors()
    same = ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], value) for name, value in theirs.items()
    )
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    record({"deterministic": is_deterministic})
    record({"bit for bit": same})
    record(
        {"apart": max((ours[name] - value).abs().max().item() for name, value in theirs.items())}
    )
    record({"seconds each": statistics.median(line["time/iteration"] for line in lines)})
    assert same or not is_deterministic
