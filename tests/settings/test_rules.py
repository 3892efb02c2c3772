"""Rules between settings: a violation is reported with its value."""

import re
from contextlib import nullcontext

import pytest
from PIL import Image

from hyvideo.settings.config import Config
from hyvideo.settings.rules import (
    SERVICE_ATTEMPTS,
    check,
    head_problems,
    layout_problems,
    process_problems,
)
from tests.forked import ROOT


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"eta": -1.0}, "eta must not be negative, got -1.0"),
        ({"eta": float("nan")}, "eta must be a finite number"),
        ({"eta": 1.5, "sde_type": "cps"}, "within \\[0, 1\\] for cps"),
        ({"eta": 0.0}, "at least one stochastic step"),
        ({"grpo_sampling_steps": 0}, "grpo_sampling_steps must be at least 1, got 0"),
        (
            {"sample_n_frames": 6},
            "must be 4n \\+ 1, because the VAE compresses 4 frames .*, got 6; use 5 or 9",
        ),
        (
            {"validation_num_frames": 6},
            "validation_num_frames must be 4n \\+ 1, .*, got 6; use 5 or 9",
        ),
        (
            {"validation_height": 32},
            "validation_height and validation_width must both be set or both be 0, got 32 and 0",
        ),
        ({"guidance_interval": "0.5"}, "must be LOW:HIGH with 0 <= LOW < HIGH <= 1, got '0.5'"),
        ({"guidance_interval": "0.7:0.7"}, "LOW < HIGH <= 1, got '0.7:0.7'"),
        ({"guidance_interval": "0:nan"}, "LOW < HIGH <= 1, got '0:nan'"),
        (
            {"guidance_interval": "0.3:0.45", "cfg_scale": 2.0},
            "no video would be guided, got 0.3:0.45 and 4 steps with shift .*; widen the interval",
        ),
        ({"validation_shift": 0.0}, "validation_shift must be positive, got 0.0"),
        (
            {"negative_prompt": " "},
            "a prompt must be printable text, got ' ' as negative_prompt: it is empty",
        ),
        ({"negative_prompt": "a\0b"}, "as negative_prompt: "),
        (
            {
                "on_reward_hacking": "stop",
                "validate_at_step0": False,
                "valid_video_csv": "assets/prompts/train.csv",
            },
            "on_reward_hacking stop needs a validation of the base model",
        ),
        (
            {"batch_size": 6},
            "6 x replicas 1 = 6 is not a multiple of num_generations 4; use batch_size 8, or change",
        ),
        ({"num_generations": 1}, "num_generations must be at least 2"),
        ({"num_updates_per_rollout": 3}, "must divide the 2 groups"),
        (
            {"num_updates_per_rollout": 2, "update_ref_model_step": 3},
            "must be a multiple of num_updates_per_rollout",
        ),
        ({"kl_coef": 1.0}, "kl_min_coef <= kl_coef <= kl_weight"),
        ({"kl_strategy": "none"}, "kl_strategy none needs kl_weight 0"),
        (
            {"anchor_cfg_scale": 3.0},
            "each refresh would guide what was learned from guidance, got 3 with kl_strategy "
            "dual_moving; set",
        ),
        (
            {
                "anchor_cfg_scale": 6.0,
                "kl_strategy": "fixed",
                "transformer_version": "480p_t2v_distilled",
            },
            "anchor_cfg_scale must be 1 if .*, got 6 with transformer_version 480p_t2v_distilled; "
            "set anchor",
        ),
        (
            {"ignore_rewards": True, "kl_strategy": "none", "kl_weight": 0.0},
            "the KL terms alone, got kl_strategy none",
        ),
        (
            {"guidance_interval": "0.3:0.45", "anchor_cfg_scale": 2.0, "kl_strategy": "fixed"},
            "no video would be guided",
        ),
        ({"reward_model": ["beauty"]}, "reward_model must be one of .*, got 'beauty'$"),
        ({"reward_model": ["miniture"]}, "got 'miniture'; did you mean miniature\\?"),
        ({"reward_model": ["miniature", "miniature"]}, "each scorer once"),
        (
            {"held_out_reward_model": ["beauty"]},
            "held_out_reward_model must be one of .*, got 'beauty'$",
        ),
        (
            {"held_out_reward_model": ["miniature"]},
            "each scorer once, because a scorer that rewards is not held out, .*, got miniature, "
            "miniature; remove",
        ),
        (
            {"score_between_stages": True},
            "which takes the scorers off the GPU during the other stages, got false; set "
            "reward_offload true",
        ),
        ({"reward_weights": "{VQ"}, "reward_weights must be"),
        ({"reward_weights": '{"VQ": 0}'}, "at least one of them not 0"),
        (
            {"reward_weights": '{"VQ": 1, "seed": 1, "reward": 0}'},
            "must not use the names reward, seed, which",
        ),
        ({"reward_weights": "[1]"}, "reward_weights must be"),
        ({"reward_weights": '{"VQ": 1e300}'}, r"of at most 1e\+30"),
        ({"reward_weights": f'{{"VQ": {10**400}}}'}, "reward_weights must be"),
        ({"reward_weights": '{"VQ": 1, "Overall": 1}'}, "must not use the names Overall, which"),
        ({"reward_weights": '{"miniature": {"seed": 1}}'}, "must not use the names seed, which"),
        (
            {"reward_weights": '{"videoalign": {"VQ": 1}}'},
            "name the scorers of reward_model, miniature, got 'videoalign'",
        ),
        ({"reward_weights": '{"a": {"b": {"VQ": 1}}}'}, "reward_weights must be"),
        ({"report_to": ["paper"]}, "report_to must be tensorboard, wandb, trackio"),
        ({"timestep_fraction": 1.5}, "timestep_fraction must be at most 1"),
        ({"adam_beta1": 1.0}, "adam_beta1 must be below 1, got 1.0"),
        ({"sp_size": 2}, "sp_size must divide the number of processes"),
        (
            {"dp_replicate": 2, "enable_fsdp": True},
            "dp_replicate must divide the 1 data-parallel replicas",
        ),
        (
            {"base_weight_dtype": "fp8"},
            "lora_rank above 0, got 0, which trains the base weights; set",
        ),
        (
            {"base_weight_dtype": "fp8", "pretrained_lora_path": "assets"},
            "got 0, which trains the base weights after merging the LoRA",
        ),
        (
            {"base_weight_dtype": "fp8", "lora_rank": 2, "enable_fsdp": True},
            "enable_fsdp true, because FSDP cannot shard fp8 weights; set enable_fsdp false",
        ),
        (
            {"master_weight_type": "bf16", "dtype": "fp32"},
            "master_weight_type bf16 needs dtype bf16",
        ),
        (
            {"master_weight_type": "bf16", "dtype": "bf16", "ema_decay": 0.99},
            "ema_decay needs master_weight_type fp32, got 0.99 and bf16",
        ),
        ({"lora_target_modules": ["attn"]}, "lora_target_modules needs a lora_rank above 0"),
        ({"pretrained_lora_path": "nowhere"}, "must be a LoRA file or folder, got 'nowhere'"),
        ({"ema_decay": 1.0}, "ema_decay must be below 1"),
        ({"prompts_csv": ""}, "prompts_csv must name a CSV file with a column `prompt`, got none"),
        ({"prompts_csv": "README.md"}, "column named `prompt`"),
        ({"pretrained_model_root": "nowhere"}, "nowhere': it does not exist; download"),
        ({"output_dir": "README.md/run"}, "README.md is not a folder"),
        ({"output_dir": "caf\udce9"}, r"output_dir must be text in UTF-8, got 'caf.udce9'; rename"),
        ({"valid_video_csv": ["caf\udce9.csv"]}, "valid_video_csv must be text in UTF-8"),
    ],
)
def test_a_broken_rule_is_reported_with_its_value(tiny_config, changes, message):
    with pytest.raises(ValueError, match=message):
        check(tiny_config.with_settings(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eta": 1.0, "sde_type": "cps"},
        {"eta": 0.0, "objective": "nft"},
        {"grpo_sampling_steps": 2},
        {"sample_n_frames": 9, "validation_num_frames": 1},
        {"validation_height": 16, "validation_width": 32},
        {"guidance_interval": "0:1", "cfg_scale": 2.0},
        {"guidance_interval": "0.7:0.75", "cfg_scale": 2.0},
        {"negative_prompt": "-"},
        {"batch_size": 2, "gradient_accumulation_steps": 2, "num_generations": 2},
        {"num_updates_per_rollout": 2, "update_ref_model_step": 2},
        {"num_updates_per_rollout": 2, "update_ref_model_step": 3, "kl_strategy": "dual_fixed"},
        {"kl_coef": 0.5, "kl_min_coef": 0.5, "kl_weight": 0.5},
        {"kl_strategy": "none", "kl_weight": 0.0},
        {"anchor_cfg_scale": 3.0, "kl_strategy": "dual_fixed", "ignore_rewards": True},
        {"anchor_cfg_scale": 1.0},  # the policy's
        {"score_between_stages": True, "reward_offload": True},
        {"reward_weights": '{"VQ": 0, "MQ": -1}'},
        {"timestep_fraction": 1.0, "anchor_fraction": 1.0},
        {"adam_beta1": 0.0, "adam_beta2": 0.99999},
        {"base_weight_dtype": "fp8", "lora_rank": 1},
        {"master_weight_type": "bf16", "dtype": "bf16", "ema_decay": 0.0},
        {"lora_target_modules": ["attn.to_q"], "lora_rank": 1},
        {"on_reward_hacking": "stop", "valid_video_csv": "assets/prompts/train.csv"},
        {"max_missing_fraction": 1.0},
        {"gate_interval": 0},
    ],
    ids=str,
)
def test_a_value_at_the_edge_of_a_rule_is_allowed(tiny_config, changes):
    check(tiny_config.with_settings(**changes))


def test_a_setting_that_needs_torchao_names_its_version_if_it_is_missing(tiny_config, monkeypatch):
    fp8 = tiny_config.with_settings(base_weight_dtype="fp8", lora_rank=2)
    check(fp8)
    monkeypatch.setattr(
        "hyvideo.settings.machine_rules.is_installed", lambda package: package != "torchao"
    )
    message = (
        "which is not installed; run `pip install torchao==0.18.0` or set base_weight_dtype bf16"
    )
    with pytest.raises(ValueError, match=f"base_weight_dtype fp8 needs torchao, {message}"):
        check(fp8)


def test_adjacent_replicas_may_share_a_group(tiny_config):
    check(tiny_config.with_settings(batch_size=2, num_generations=4), world_size=2)
    with pytest.raises(
        ValueError, match="batch_size must be a multiple or a divisor of num_generations"
    ):
        check(tiny_config.with_settings(batch_size=4, num_generations=6), world_size=3)


@pytest.mark.parametrize(
    "layout, message",
    [
        ((8, 2, 2), None),
        ((12, 3), None),  # heads may be split unevenly
        (
            (17, 17),
            "sp_size must be at most the 16 attention heads of the transformer, got 17; 1, 2, 4, "
            "8, 16 give",
        ),
        (
            (8, 3),
            "must divide the number of processes, got sp_size 3 and WORLD_SIZE 8; possible values: "
            "1, 2, 4, 8",
        ),
        (
            (8, 2, 3),
            "dp_replicate must divide the 4 data-parallel replicas .* got 3; possible values: 1, "
            "2, 4",
        ),
        (
            (1, 2),
            "got sp_size 2 and WORLD_SIZE 1; start 2 with torchrun --nproc_per",
        ),
    ],
)
def test_a_layout_has_whole_replicas_and_a_head_for_every_rank(layout, message):
    problems = [*layout_problems(*layout), *head_problems(layout[1], 16)]
    assert len(problems) == (0 if message is None else 1)
    assert message is None or re.search(message, problems[0])


MINIATURE = {
    "transformer_version": "miniature",
    "pretrained_model_root": str(ROOT / "assets/miniature"),
}


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"transformer_version": "480p_i2v"},
            "for image-to-video, got no reference image for the .* prompts",
        ),
        (
            {"valid_video_csv": "images.csv"},
            "480p_t2v is for text-to-video, got 1 reference images in valid",
        ),
        (
            {"validation_height": 481, "validation_width": 864, "valid_video_csv": "text.csv"},
            "multiple of 16, got 481 for a validation video$",
        ),
        ({"width": 625}, "width must be a multiple of 16, got 625 for a rollout$"),
        ({"validation_height": 481, "validation_width": 864}, None),
        (
            {**MINIATURE, "height": 33, "width": 32},
            "height must be a multiple of 8, got 33 for a rollout$",
        ),
        ({**MINIATURE, "height": 40, "width": 32}, None),
        ({"transformer_version": "480p_i2v", "prompts_csv": "images.csv"}, None),
        ({"transformer_version": "480p_i2v", "prompts_csv": "absent.csv"}, None),
        ({"transformer_version": "mine", "width": 625, "prompts_csv": "images.csv"}, None),
    ],
)
def test_limits_of_a_released_version_are_checked_without_its_files(
    tmp_path, monkeypatch, settings, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.csv").write_text("prompt\na\n")
    (tmp_path / "images.csv").write_text("prompt,ref_image_path\na,image.png\nb,\n")
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    config = Config().with_settings(batch_size=4, **settings).resolved()
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check(config, on_this_machine=False)


@pytest.mark.parametrize(
    "settings, num_problems",
    [
        ({"watchdog_seconds": 900.0, "collective_timeout": 1000.0}, 0),
        ({"watchdog_seconds": 901.0, "collective_timeout": 1000.0}, 1),
        ({"dp_replicate": 2, "enable_fsdp": True}, 0),
        ({"dp_replicate": 2}, 1),
        (
            {
                "remote_reward_url": "http://a,http://b",
                "remote_reward_timeout": 1440 / SERVICE_ATTEMPTS / 2,
            },
            0,
        ),
        (
            {
                "remote_reward_url": "http://a,http://b",
                "remote_reward_timeout": 1441 / SERVICE_ATTEMPTS / 2,
            },
            1,
        ),
    ],
)
def test_timeouts_may_be_equal_to_their_limits(settings, num_problems):
    config = Config().with_settings(**settings)
    assert len([*process_problems(config, 2)]) == num_problems


def test_all_problems_are_reported_together(tiny_config):
    with pytest.raises(ValueError) as error:
        check(tiny_config.with_settings(eta=-1.0, grpo_sampling_steps=0))
    assert len(str(error.value).splitlines()) == 2


def test_reward_services_must_time_out_before_the_reward_deadline(tiny_config):
    services = {
        "remote_reward_url": "http://a:1, http://b:1",
        "batch_size": 4,
        "watchdog_seconds": 0.0,
    }
    config = tiny_config.with_settings(
        **services, remote_reward_timeout=14.0, collective_timeout=100.0
    )
    check(config)
    message = (
        "3 attempts at 2 reward services must take at most 0.8 .* would end the run, got 84 s and "
        "80 s; lower"
    )
    with pytest.raises(ValueError, match=message):
        check(config, 2)
    check(config.with_settings(collective_timeout=105.0), 2)
    check(config.with_settings(remote_reward_url="http://a:1"), 2)
