"""A resumed run equals the uninterrupted run bit for bit, and does not resume with other settings
of the method.
"""

import json

import pytest
import torch

from hyvideo.trainer import Trainer
from hyvideo.training.run_state import check_changes
from tests.shallow import SHALLOW
from tests.test_trainer import CPU, TIMING, Redness

SETTINGS = {
    "pretrained_model_root": SHALLOW,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_generations": 2,
    "grpo_sampling_steps": 3,
    "num_updates_per_rollout": 2,
    "mini_batch_size_per_update": 2,
    "learning_rate": 1e-3,
    "ema_decay": 0.9,
    "kl_weight": 1e-2,
    "kl_schedule": "adaptive",
    "kl_warmup_updates": 2,
    "kl_target": 1e-4,
    # after two iterations the anchor is four updates old; it moves in the third
    "update_ref_model_step": 6,
    "warmup_steps": 3,
    "num_threads": 1,
}
LORA = {"lora_rank": 2}
BF16 = {"dtype": "bf16"}
CASES = {
    "dual_moving, LoRA, bf16, Muon, saved right after the anchor moved": {
        "kl_strategy": "dual_moving",
        **LORA,
        **BF16,
        "optimizer": "muon",
        "update_ref_model_step": 4,
    },
    "moving, LoRA on fp8, a window": {
        "kl_strategy": "moving",
        **LORA,
        **BF16,
        "base_weight_dtype": "fp8",
        "sde_window": "random:1",
    },
}


def train_iterations(trainer, iterations):
    """Run iterations and return their metrics without times."""
    lines = []
    for _ in range(iterations):
        trainer.iteration += 1
        metrics = trainer.run_iteration()
        lines.append(
            {name: repr(value) for name, value in metrics.items() if not name.startswith(TIMING)}
        )
    return lines


def snapshot(trainer):
    """Return the complete state of a run."""
    anchor = trainer.run.policy.anchor
    tensors = {
        name: tensor.detach().clone() for name, tensor in trainer.run.policy.tensors().items()
    }
    numbers = {
        "update": trainer.run.update.update_count,
        "age": anchor.age if anchor else None,
        "kl": trainer.run.update.kl_coefficient.state_dict(),
        "health": trainer.run.update.nonfinite.state_dict(),
    }
    return tensors, numbers


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_the_uninterrupted_run_bit_for_bit(tiny_config, mesh, tmp_path, case):
    config = tiny_config.with_settings(**SETTINGS | CASES[case])
    uninterrupted = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    train_iterations(uninterrupted, 2)
    folder = uninterrupted.run.state.save()
    uninterrupted.run.state.checkpoints.wait()
    expected = train_iterations(uninterrupted, 2)

    out = {"output_dir": str(tmp_path / "resumed")}
    resuming = config.with_settings(resume_from_checkpoint=str(folder), **out)
    resumed = Trainer(resuming, mesh, CPU, scorers={"test": Redness()})
    (change,) = resumed.run.state.changed_settings
    assert resumed.iteration == 2 and change.startswith("output_dir")
    assert train_iterations(resumed, 2) == expected
    (tensors, numbers), (expected_tensors, expected_numbers) = (
        snapshot(resumed),
        snapshot(uninterrupted),
    )
    assert numbers == expected_numbers
    assert numbers["update"] == numbers["kl"]["num_updates"] == len(numbers["health"]["norms"]) == 8
    assert len(numbers["kl"]["recent"]) >= 3
    assert tensors.keys() == expected_tensors.keys()
    assert {name.split(".")[0] for name in tensors} >= {"policy", "optimizer", "average"}
    for name, tensor in tensors.items():
        assert tensor.dtype == expected_tensors[name].dtype and torch.equal(
            tensor, expected_tensors[name]
        ), name


# --- settings that changed ------------------------------------------------------------------------


def changes(config, *, inputs=None, now=None, **settings):
    """Return the accepted changes of a resume with other settings and digests of inputs."""
    saved = json.loads(json.dumps(config.flat()))
    return check_changes(
        saved,
        inputs or {},
        config.with_settings(**settings).flat(),
        now or {},
        same_rollouts=True,
    )


def test_machine_settings_may_change_and_settings_of_the_method_are_accepted_by_name(tiny_config):
    assert changes(tiny_config, sp_size=2) == ["sp_size is 2 and was 1"]
    method = {"learning_rate": 1.0, "seed": 3}
    with pytest.raises(ValueError, match="--allow_changed_settings seed learning_rate$"):
        changes(tiny_config, sp_size=2, **method)
    with pytest.raises(ValueError, match="--allow_changed_settings learning_rate$"):
        changes(tiny_config, allow_changed_settings=["seed"], **method)
    for allowed in (["seed", "learning_rate"], ["all"]):
        accepted = changes(tiny_config, sp_size=2, allow_changed_settings=allowed, **method)
        assert sorted(change.split()[0] for change in accepted) == [
            "learning_rate",
            "seed",
            "sp_size",
        ]


def test_changed_inputs_are_accepted_by_name(tiny_config):
    digests = {"inputs": {"prompts_csv": "a", "reward_model": "b"}}
    now = {"prompts_csv": "c", "reward_model": "b", "pretrained_model_root/vae": "new"}
    with pytest.raises(ValueError, match="--allow_changed_settings prompts_csv$"):
        changes(tiny_config, **digests, now=now)
    (change,) = changes(tiny_config, **digests, now=now, allow_changed_settings=["prompts_csv"])
    assert tiny_config.data.prompts_csv[0] in change


def test_save_minutes_are_counted_from_the_last_checkpoint(tiny_config, mesh, monkeypatch):
    now = 0.0
    monkeypatch.setattr("hyvideo.training.run_state.time.monotonic", lambda: now)
    trainer = Trainer(
        tiny_config.with_settings(save_minutes=2.0), mesh, CPU, scorers={"test": Redness()}
    )
    due = []
    for seconds in (0, 119, 120, 121, 239, 240, 300):
        now = seconds
        due.append(trainer.run.state.is_save_due())
        if due[-1]:
            trainer.run.state.save()
    trainer.run.state.checkpoints.wait()
    assert due == [False, False, True, False, False, True, False]
    trainer.run.state.config = tiny_config.with_settings(save_minutes=0.0)
    now = 1e9
    assert not trainer.run.state.is_save_due()
