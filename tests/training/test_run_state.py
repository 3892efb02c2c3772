"""A resumed run equals the uninterrupted run bit for bit, and does not resume with other settings
of the method.
"""

import dataclasses
import json

import pytest
import torch

import post_train
from hyvideo.models.lora import Pair, save_lora
from hyvideo.records.metrics_file import complete_lines
from hyvideo.settings.command_line import load_config
from hyvideo.settings.identity import changed_settings
from hyvideo.trainer import Trainer
from hyvideo.training.run_state import changed_contents, check_changes, hash_files
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
    "kl_window": 3,
    "kl_target": 1e-4,
    # after two iterations the anchor is four updates old; it moves in the third
    "update_ref_model_step": 6,
    "warmup_steps": 3,
    "num_threads": 1,
}
LORA = {"lora_rank": 2}
BF16 = {"dtype": "bf16"}
CASES = {
    "none": {"kl_weight": 0.0},
    "fixed, LoRA": {"kl_strategy": "fixed", **LORA},
    "stepwise, bf16": {"kl_strategy": "stepwise", **BF16},
    "dual_moving, bf16 throughout": {
        "kl_strategy": "dual_moving",
        **BF16,
        "master_weight_type": "bf16",
    },
    "dual_moving, LoRA, bf16, Muon, saved right after the anchor moved": {
        "kl_strategy": "dual_moving",
        **LORA,
        **BF16,
        "use_muon": True,
        "update_ref_model_step": 4,
    },
    "moving, LoRA on fp8, a window": {
        "kl_strategy": "moving",
        **LORA,
        **BF16,
        "base_weight_dtype": "fp8",
        "sde_window": "random:1",
    },
    "dual_fixed, Muon, guidance": {"kl_strategy": "dual_fixed", "use_muon": True, "cfg_scale": 2.0},
}
# The other cases of the default suite have each of their parts.
COVERED = (
    "none",
    "fixed, LoRA",
    "dual_fixed, Muon, guidance",
    "dual_moving, bf16 throughout",
    "stepwise, bf16",
)


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


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case in COVERED else case for case in CASES],
)
def test_a_resumed_run_equals_the_uninterrupted_run_bit_for_bit(tiny_config, mesh, case):
    config = tiny_config.with_settings(**SETTINGS | CASES[case])
    uninterrupted = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    train_iterations(uninterrupted, 2)
    folder = uninterrupted.run.state.save()
    uninterrupted.run.checkpoints.wait()
    expected = train_iterations(uninterrupted, 2)

    resuming = config.with_settings(resume_from_checkpoint=str(folder))
    resumed = Trainer(resuming, mesh, CPU, scorers={"test": Redness()})
    assert resumed.iteration == 2 and resumed.run.state.changed_settings == []
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


def find_changes(config, **changes):
    saved = json.loads(json.dumps(config.flat()))
    return changed_settings(saved, config.with_settings(**changes).flat(), same_rollouts=True)


def test_settings_survive_the_round_trip_through_json(tiny_config):
    found = find_changes(tiny_config, resume_from_checkpoint="latest", allow_changed_settings=True)
    assert found.free == found.affecting_learning == []


def test_machine_settings_may_change_and_method_settings_may_not(tiny_config):
    method = {"learning_rate": 1.0, "seed": 3, "base_weight_dtype": "fp8"}
    found = find_changes(tiny_config, save_interval=7, max_steps=99, sp_size=2, **method)
    assert sorted(message.split()[0] for message in found.free) == [
        "max_steps",
        "save_interval",
        "sp_size",
    ]
    assert sorted(message.split()[0] for message in found.affecting_learning) == sorted(method)
    assert "learning_rate is 1.0 and was 0.0001" in found.affecting_learning
    with pytest.raises(ValueError, match="written with other settings:\n.*\n.*\n.*\nRestore them"):
        check_changes(found)


def test_the_layout_may_change_if_the_number_of_rollouts_stays(tiny_config):
    saved, settings = tiny_config.flat(), tiny_config.with_settings(batch_size=4).flat()
    assert not changed_settings(saved, settings, same_rollouts=True).affecting_learning
    assert changed_settings(saved, settings, same_rollouts=False).affecting_learning == [
        "batch_size is 4 and was 8"
    ]


def test_a_changed_initial_lora_is_detected(tiny_config, tmp_path):
    pair = Pair(torch.ones(2, 4), torch.ones(4, 2), 4.0)
    save_lora({"transformer_blocks.0.attn.to_q": pair}, tmp_path, form="peft")
    config = tiny_config.with_settings(pretrained_lora_path=str(tmp_path))
    assert find_changes(tiny_config, pretrained_lora_path=str(tmp_path)).affecting_learning
    before = hash_files(config.flat())
    save_lora(
        {"transformer_blocks.0.attn.to_q": dataclasses.replace(pair, alpha=2.0)},
        tmp_path,
        form="peft",
    )
    found = changed_contents(before, hash_files(config.flat()), config.flat())
    names = ", ".join(
        str(tmp_path / name) for name in ("adapter_model.safetensors", "adapter_config.json")
    )
    assert found == [f"the contents of pretrained_lora_path {names} have changed"]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_changed_rubric_of_a_judge_is_detected(tiny_config, tmp_path, as_json):
    rubric, options = (
        tmp_path / "rubric.yaml",
        {"vlm_judge": {"rubric": str(tmp_path / "rubric.yaml"), "model": "m"}},
    )
    rubric.write_text("dimensions: {}")
    (tmp_path / "judge.yaml").write_text(json.dumps(options))
    reward_config = json.dumps(options) if as_json else str(tmp_path / "judge.yaml")
    settings = tiny_config.with_settings(
        reward_model=["vlm_judge"], reward_config=reward_config
    ).flat()
    before = hash_files(settings)
    assert not changed_contents(before, hash_files(settings), settings)
    rubric.write_text("dimensions: {VQ: {}}")
    (found,) = changed_contents(before, hash_files(settings), settings)
    assert found.startswith("the contents of reward_config ") and f"{rubric} have changed" in found


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.system
def test_post_train_rejects_changed_method_settings_unless_allowed_and_lists_the_others(
    tiny_config, mesh, tmp_path, monkeypatch, capsys
):
    def program(*command):
        monkeypatch.setattr("sys.argv", list(command))
        return post_train.main(), *capsys.readouterr()

    out = tmp_path / "run"
    settings = SETTINGS | {
        "valid_video_csv": "",
        "report_to": "none",
        "output_dir": str(out),
        "cfg_scale": 1.0,
        **LORA,
    }
    config = load_config("configs/smoke.yaml", **settings | {"report_to": ["none"], "max_steps": 1})
    Trainer(config, mesh, CPU).train()
    before = files(out)
    flags = [f"--{name}={value}" for name, value in settings.items()]
    command = [
        "post_train.py",
        "--config",
        "configs/smoke.yaml",
        *flags,
        "--resume_from_checkpoint=latest",
    ]
    changed = ["--max_steps=2", "--save_interval=2", "--learning_rate=1e-4", "--clip_range=0.5"]
    code, _, error = program(*command, *changed)
    assert code == 2
    assert "learning_rate is 0.0001 and was 0.001" in error and "clip_range is 0.5" in error
    assert "save_interval" not in error and "allow_changed_settings" in error
    assert files(out) == before
    code, output, _ = program(*command, *changed, "--allow_changed_settings=true")
    assert code == 0
    for name in (
        "max_steps is 2 and was 1",
        "save_interval",
        "learning_rate is 0.0001 and was 0.001",
        "clip_range",
    ):
        assert f"changed settings       {name}" in output
    assert [iteration for iteration, _ in complete_lines(out / "metrics.jsonl")] == [1, 2]


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
    trainer.run.checkpoints.wait()
    assert due == [False, False, True, False, False, True, False]
    trainer.run.state.config = tiny_config.with_settings(save_minutes=0.0)
    now = 1e9
    assert not trainer.run.state.is_save_due()
