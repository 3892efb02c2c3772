"""Rules between settings, and the arithmetic of a run."""

import sys

import pytest

from hyvideo.config.run_plan import check, describe, make_plan, num_stochastic_steps


def test_the_settings_of_the_shipped_configs_are_sound(tiny_config):
    check(tiny_config)


def test_the_arithmetic_of_the_large_setting(tiny_config):
    config = tiny_config.with_settings(batch_size=2, num_generations=4, sp_size=2)
    plan = make_plan(config, world_size=64)
    assert (plan.replicas, plan.rollouts, plan.groups) == (32, 64, 16)


def test_forwards_count_guidance_training_and_anchor(tiny_config):
    config = tiny_config.with_settings(cfg_scale=6.0, grpo_sampling_steps=20, shift=5.0, last_step="stochastic")
    assert make_plan(config).forwards_per_rollout == 2 * (20 + 3 * 20 + 20)
    free = config.with_settings(kl_weight=0.0, enable_gradient_checkpointing=True, timestep_fraction=0.5)
    assert make_plan(free).forwards_per_rollout == 2 * (20 + 4 * 10)
    assert make_plan(config.with_settings(timestep_fraction=0.5)).forwards_per_rollout == 2 * (20 + 3 * 10 + 10)


def test_it_is_said_whether_the_clip_can_bind(tiny_config):
    assert not make_plan(tiny_config).clip_can_bind
    twice = tiny_config.with_settings(num_updates_per_rollout=2)
    assert make_plan(twice).clip_can_bind
    assert "can bind: yes" in describe(twice, make_plan(twice))


def test_steps_that_sage_cannot_make_stochastic_are_not_counted(tiny_config):
    config = tiny_config.with_settings(grpo_sampling_steps=100, shift=5.0, last_step="stochastic")
    assert num_stochastic_steps(config) == 99


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"eta": -1.0}, "eta must not be negative, got -1.0"),
        ({"eta": float("nan")}, "eta must be a finite number"),
        ({"eta": 1.5, "sde_type": "cps"}, "within \\[0, 1\\] for cps"),
        ({"eta": 0.0}, "at least one stochastic step"),
        ({"grpo_sampling_steps": 0}, "grpo_sampling_steps must be at least 1, got 0"),
        ({"sample_n_frames": 6}, "must be 4n \\+ 1, got 6"),
        ({"batch_size": 6}, "6 is not a multiple of num_generations 4"),
        ({"num_generations": 1}, "num_generations must be at least 2"),
        ({"num_updates_per_rollout": 3}, "must divide the 2 groups"),
        ({"num_updates_per_rollout": 2, "update_ref_model_step": 3}, "must be a multiple of num_updates_per_rollout"),
        ({"kl_coef": 1.0}, "kl_min_coef <= kl_coef <= kl_weight"),
        ({"kl_strategy": "fixed", "kl_weight": 0.0}, "kl_strategy fixed needs kl_weight > 0"),
        ({"kl_strategy": "none"}, "kl_strategy none means kl_weight 0"),
        ({"reward_model": ["beauty"]}, "reward_model must be of .*, got 'beauty'"),
        ({"reward_model": ["miniature", "miniature"]}, "each scorer once"),
        ({"reward_weights": "{VQ"}, "reward_weights must be"),
        ({"reward_weights": '{"VQ": 0}'}, "with one not 0"),
        ({"reward_weights": "[1]"}, "reward_weights must be"),
        ({"reward_weights": '{"a": {"b": {"VQ": 1}}}'}, "reward_weights must be"),
        ({"report_to": ["paper"]}, "report_to takes"),
        ({"timestep_fraction": 1.5}, "timestep_fraction must be at most 1"),
        ({"adam_beta1": 1.0}, "adam_beta1 must lie in"),
        ({"sp_size": 2}, "multiple of sp_size"),
        ({"dp_replicate": 2, "enable_fsdp": True}, "dp_replicate must divide the 1 data-parallel replicas"),
        ({"use_8bit_adam": True}, "needs torchao, which is not installed"),
        ({"master_weight_type": "bf16", "dtype": "fp32"}, "master_weight_type bf16 needs dtype bf16"),
        (
            {"master_weight_type": "bf16", "dtype": "bf16", "ema_decay": 0.99},
            "ema_decay needs master_weight_type fp32, got 0.99 and bf16",
        ),
        ({"lora_target_modules": "attn"}, "lora_target_modules needs a lora_rank above 0"),
        ({"ema_decay": 1.0}, "ema_decay must lie in"),
        ({"prompts_csv": ""}, "prompts_csv must name a CSV"),
        ({"prompts_csv": "README.md"}, "column named `prompt`"),
        ({"pretrained_model_root": "nowhere"}, "which is not there"),
        ({"output_dir": "README.md/run"}, "README.md is not a folder"),
    ],
)
def test_a_broken_rule_is_named_with_its_value(tiny_config, changes, said):
    with pytest.raises(ValueError, match=said):
        check(tiny_config.with_settings(**changes))


def test_groups_may_be_shared_by_neighbouring_replicas(tiny_config):
    check(tiny_config.with_settings(batch_size=2, num_generations=4), world_size=2)
    with pytest.raises(ValueError, match="one must be a multiple of the other"):
        check(tiny_config.with_settings(batch_size=4, num_generations=6), world_size=3)


def test_a_folder_with_another_run_is_refused(tiny_config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="already holds a run"):
        check(tiny_config)
    check(tiny_config.with_settings(resume_from_checkpoint="latest"))


def test_all_problems_are_told_at_once(tiny_config):
    with pytest.raises(ValueError) as error:
        check(tiny_config.with_settings(eta=-1.0, grpo_sampling_steps=0))
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize("content", ["", "broken\n{}\n"])
def test_only_lines_of_metrics_make_a_run(tiny_config, tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(content)
    if not content:
        check(tiny_config)
        return
    with pytest.raises(ValueError, match="already holds a run"):
        check(tiny_config)


def test_a_run_with_a_broken_line_is_not_gone_on_with(tiny_config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"iteration": 1}\n{"itera\n{"iteration": 3}\n')
    with pytest.raises(ValueError, match="line 2 of .*metrics.jsonl is not a JSON object with an iteration"):
        check(tiny_config.with_settings(resume_from_checkpoint="latest"))


@pytest.mark.parametrize("report", ["wandb", "tensorboard"])
def test_a_report_that_is_not_installed_is_refused(tiny_config, monkeypatch, report):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f'report_to has "{report}", which is not installed'):
        check(tiny_config.with_settings(report_to=[report]))
    check(tiny_config)
