"""Command lines of the public reference: every flag is a setting here, is ignored with a note, or
raises an error.
"""

import re
from pathlib import Path

import pytest

import generate
from hyvideo.settings.command_line import load_config, parse
from hyvideo.settings.config import LEAVES, Config
from hyvideo.settings.reference_flags import (
    IGNORED,
    RENAMED,
    SIZES,
    SWITCHES,
    is_ignored,
)

ROOT = Path(__file__).parents[2]
LINE = (
    "--pretrained_model_root ./ckpts --learning_rate 1e-5 --batch_size 2 --num_generations 4 "
    "--max_steps 10000 --output_dir ./outputs --enable_fsdp --enable_gradient_checkpointing "
    "--sp_size 2 --reward_checkpoint_mode v3 --validate_at_step0 False --validate_video_length 121 "
    "--validation_timestep_shift 5.0 --use_grad_balancing True --enable_timestep_permutation True "
    "--sde_type sage_grpo --kl_weight 1e-5 --kl_coef 1e-7 --use_moving_KL True "
    "--update_ref_model_step 10 --use_dual_kl True --dual_kl_moving_weight 1.0 "
    "--dual_kl_step_weight 0.1 --reference_mode_offload True"
).split()
# Known flags of the reference besides those of its training command.
KNOWN = (
    "pretrained_transformer_version train_video_csv valid_video_csv validation_global_seed "
    "validation_fixed_size validation_num_inference_steps validate_video_length "
    "validation_timestep_shift validate_at_step0 validation_negative_prompt neg_prompt use_lora "
    "lora_r lora_alpha lora_dropout lora_target_modules pretrained_lora_path video_fps "
    "infer_flow_shift_video adv_clip_max precision vae_precision video_bucket_hw_base_size "
    "reward_model reward_weights reward_config post_train_type task_type data_type i2v_prob "
    "train_timestep_shift snr_type flow_snr_type num_workers prefetch_factor log_interval "
    "model_type vae_name multitask_mask_training_type debug_* save_interval warmup_steps "
    "validation_video_length video_length validation_prompts "
    "debug_train_diagnostics_interval"
).split()
# Flags of generate.py in HunyuanVideo-1.5 and in SAGE-GRPO.
KNOWN_OF_GENERATE = (
    "prompt negative_prompt image_path resolution aspect_ratio video_length num_inference_steps "
    "seed dtype model_path output_path checkpoint_path lora_path cfg_distilled enable_step_distill "
    "sparse_attn rewrite offloading group_offloading overlap_group_offloading sr save_pre_sr_video "
    "save_generation_config use_sageattn sage_blocks_range enable_torch_compile enable_cache "
    "cache_type no_cache_block_id cache_start_step cache_end_step total_steps cache_step_interval "
    "use_fp8_gemm quant_type include_patterns valid_video_csv fixed_size original_noise_dir"
).split()


def settings_of(*flags):
    return parse([*flags]).config.flat()


def error_of(capsys, *flags):
    with pytest.raises(SystemExit) as exit_:
        parse([*flags])
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_every_flag_of_the_reference_is_a_setting_or_known():
    known = {*LEAVES, *RENAMED, *SIZES, *SWITCHES, "video_bucket_hw_base_size"}
    assert not [name for name in KNOWN if (name in known) == is_ignored(name)]
    assert not {*RENAMED, *SIZES, *SWITCHES, *IGNORED} & LEAVES.keys()
    assert {*RENAMED.values()} <= LEAVES.keys()


def test_generate_knows_every_flag_of_the_reference():
    options = vars(generate.parse(["--prompt", "a", "--model_path", "b"]))
    assert options["pretrained_model_root"] == "b"
    assert not [name for name in KNOWN_OF_GENERATE if name not in {*options, "model_path"}]


def test_the_training_command_of_the_reference_is_accepted(capsys):
    settings = settings_of(*LINE)
    assert (settings["validation_num_frames"], settings["validation_shift"]) == (121, 5.0)
    assert (
        settings["validate_at_step0"] is False
        and settings["enable_fsdp"] is True
        and settings["kl_strategy"] == "dual_moving"
    )
    assert (settings["sp_size"], settings["kl_coef"]) == (2, 1e-7)
    assert settings["prompts_csv"] == ["assets/prompts/train.csv"] and settings["reward_model"] == [
        "videoalign"
    ]
    assert "reward_checkpoint_mode" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            "--pretrained_transformer_version 720p_t2v",
            {"transformer_version": "720p_t2v", "shift": 9.0},
        ),
        ("--train_video_csv a.csv b.csv", {"prompts_csv": ["a.csv", "b.csv"]}),
        ("--validation_fixed_size 480x864", {"validation_height": 480, "validation_width": 864}),
        ("--video_length 121 --validate_video_length 121", {"validation_num_frames": 121}),
        ("--validation_negative_prompt blurry --neg_prompt blurry", {"negative_prompt": "blurry"}),
        ("--neg_prompt none", {"negative_prompt": ""}),
        ("--use_lora on --lora_r 32", {"lora_rank": 32, "lora_alpha": 16}),
        ("--use_lora false --lora_r 32", {"lora_rank": 0}),
        ("--adv_clip_max 3", {"advantage_clip": 3}),
        ("--precision fp32 --vae_precision bf16", {"dtype": "fp32", "vae_dtype": "bf16"}),
        ("--video_bucket_hw_base_size 480", {"height": 352, "width": 624}),
    ],
)
def test_a_renamed_flag_sets_the_setting(flags, expected, tmp_path):
    settings = settings_of(*flags.split())
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize(
    "flags, strategy",
    [
        ("", "dual_moving"),
        ("--use_moving_KL False", "dual_fixed"),
        ("--use_dual_kl off", "moving"),
        ("--use_moving_KL=0 --use_dual_kl=0", "fixed"),
    ],
)
def test_the_switches_of_the_reference_choose_the_kl_strategy(flags, strategy):
    settings = settings_of(*flags.split())
    assert settings["kl_strategy"] == strategy
    assert not settings.keys() & {"use_moving_KL", "use_dual_kl"}


@pytest.mark.parametrize(
    "content, flags, strategy",
    [
        ("use_moving_KL: false", "", "dual_fixed"),
        # the config.yaml of a run
        ("kl_strategy: fixed\nuse_dual_kl: true\nuse_moving_KL: true", "", "fixed"),
        ("kl_strategy: fixed", "--use_moving_KL true", "moving"),
        ("use_dual_kl: false\nkl_weight: 0", "--kl_weight 1e-5", "moving"),
    ],
)
def test_a_flag_changes_the_kl_strategy_of_a_file(tmp_path, content, flags, strategy):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    assert settings_of("--config", str(path), *flags.split())["kl_strategy"] == strategy


@pytest.mark.parametrize(
    "content, flags, offload",
    [
        ("", "--reference_mode_offload", ["anchor"]),
        ("offload: vae", "--reference_mode_offload True", ["vae", "anchor"]),
        ("offload: [anchor, vae]", "--reference_mode_offload False", ["vae"]),
        (
            "offload: [anchor, vae]",
            "--reference_mode_offload True --offload reward",
            ["reward", "anchor"],
        ),
        ("reference_mode_offload: true\noffload: [vae]", "", ["vae", "anchor"]),
        ("offload: [anchor, vae]", "--offload=", []),
    ],
)
def test_the_switch_of_the_reference_model_adds_the_anchor_or_takes_it_away(
    tmp_path, content, flags, offload
):
    file = tmp_path / "run.yaml"
    file.write_text(f"seed: 1\n{content}")
    assert settings_of("--config", str(file), *flags.split())["offload"] == offload


def test_a_switch_beside_a_kl_strategy_is_reported(capsys):
    assert settings_of("--kl_strategy", "fixed", "--use_dual_kl", "true")["kl_strategy"] == "fixed"
    assert "use_dual_kl" in capsys.readouterr().err


def test_files_may_use_reference_names_and_flags_override_them(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(
        "use_lora: true\ntrain_video_csv: [a.csv, b.csv]\nvideo_fps: 16\nnum_workers: 4\n"
    )
    data = load_config(path).data
    assert (data.prompts_csv, data.fps) == (["a.csv", "b.csv"], 16)
    settings = settings_of("--config", str(path), "--lora_r", "4", "--fps", "8")
    assert (settings["lora_rank"], settings["lora_alpha"], settings["fps"]) == (4, 16, 8)
    assert "num_workers" in capsys.readouterr().err
    path.write_text("lora_rank: 64\n")
    assert settings_of("--config", str(path), "--use_lora")["lora_rank"] == 64
    assert settings_of("--config", str(path), "--use_lora", "no")["lora_rank"] == 0
    path.write_text("fps: 24\nvideo_fps: 16\n")
    with pytest.raises(ValueError, match="run.yaml: fps and video_fps"):
        load_config(path)


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--neg_prompt a --negative_prompt b", "neg_prompt negative_prompt"),
        ("--width 640 --video_bucket_hw_base_size 480", "width video_bucket_hw_base_size"),
        ("--neg_prompt", "neg_prompt"),
        ("--validation_fixed_size 480", "validation_fixed_size"),
        ("--precision fp16", "--precision"),
        ("--video_bucket_hw_base_size 512", "video_bucket_hw_base_size 480"),
        ("--use_dual_kl maybe", "use_dual_kl"),
    ],
)
def test_contradictions_and_invalid_values_name_the_given_flag(capsys, flags, named):
    err = error_of(capsys, *flags.split())
    assert [word for word in named.split() if word not in err] == []


@pytest.mark.parametrize(
    "line, expected",
    [
        ("neg_prompt: none", {"negative_prompt": ""}),
        ("neg_prompt:", {"negative_prompt": ""}),
        ("train_video_csv: {a: b}", None),
        ("validate_video_length: 121.0", {"validation_num_frames": 121}),
        ("validate_video_length: 121.5", None),
        ("use_lora: no", {"lora_rank": 0}),
        ("task_type: i2v", {"transformer_version": "480p_t2v"}),
    ],
)
def test_a_value_under_a_reference_name_is_checked_like_the_setting(tmp_path, line, expected):
    path = tmp_path / "run.yaml"
    path.write_text(line)
    if expected is None:
        with pytest.raises(ValueError, match="run.yaml: .*prompts_csv|validation_num_frames|lora"):
            load_config(path)
    else:
        settings = load_config(path).flat()
        assert {name: settings[name] for name in expected} == expected


def test_an_ignored_flag_is_reported_on_one_rank(capsys, monkeypatch):
    assert settings_of("--num_workers", "4") == Config().resolved().flat()
    assert "num_workers" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    settings_of("--num_workers", "4")
    assert capsys.readouterr().err == ""


# --- docs/coming_from_other_code.md ----------------------------------------------------------------------


def test_the_page_has_every_renamed_flag_and_the_current_defaults():
    page = (ROOT / "docs/coming_from_other_code.md").read_text()
    names = (*RENAMED, *SIZES, *SWITCHES)
    assert [name for name in names if f"`{name}`" not in page] == []
    differing = re.findall(
        r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", page[page.index("## Defaults") :], re.MULTILINE
    )
    assert len(differing) >= 12
    defaults = Config().flat()
    for name, here in differing:
        value = defaults[name]
        text = " ".join(value) if isinstance(value, list) else value
        assert (str(text).lower() if text not in ("", None) else "none") == here, name
