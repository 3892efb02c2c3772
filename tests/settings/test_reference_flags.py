"""Command lines of the public reference: every flag is a setting here, is ignored with a note, or
raises an error.
"""

import re
from pathlib import Path

import pytest

import generate
from hyvideo.settings.command_line import load_config, parse
from hyvideo.settings.config import LEAVES, Config
from hyvideo.settings.reference_flags import NO_SETTINGS, TASK, table, with_flags

ROOT = Path(__file__).parents[2]
TRAINING, GENERATION = table("post_train"), table("generate")
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
    "muon_scope validation_video_length video_length validation_prompts "
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
    ignored = "reward_checkpoint_mode v3; the tensor names of the checkpoint are recognized"
    assert capsys.readouterr().err == f"ignored flags: {ignored}\n"


def test_step_counts_are_taken_over_unchanged_with_several_batches_per_iteration():
    """The plan at the start says that the reference counts batches: a command line cannot say who
    wrote it.
    """
    settings = settings_of(
        *LINE, *"--gradient_accumulation_steps 4 --max_steps 100 --save_interval 20".split()
    )
    names = ("gradient_accumulation_steps", "max_steps", "save_interval")
    assert tuple(settings[name] for name in names) == (4, 100, 20)


def test_every_flag_of_the_reference_is_a_setting_or_a_row():
    assert not [name for name in KNOWN if name not in LEAVES and name not in TRAINING]
    assert not TRAINING.keys() & LEAVES.keys()
    sets = {
        name for row in TRAINING.values() for of in (row.sets, *row.values.values()) for name in of
    }
    assert sets - LEAVES.keys() == {*NO_SETTINGS}


def test_generate_knows_every_flag_of_the_reference():
    options = vars(generate.parse(["--prompt", "a", "--model_path", "b"]))
    options["model_path"] = options["pretrained_model_root"]  # an old name
    assert not [name for name in KNOWN_OF_GENERATE if (name in options) == (name in GENERATION)]
    assert GENERATION.keys() <= {*KNOWN_OF_GENERATE}
    for name, row in GENERATION.items():
        if row.rejected:
            alternatives = re.findall(r"--(\w+)", row.rejected)
            assert alternatives and options.keys() >= {*alternatives}, f"{name}: {row.rejected}"


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            "--pretrained_transformer_version 720p_t2v",
            {"transformer_version": "720p_t2v", "shift": 9.0},
        ),
        ("--train_video_csv a.csv b.csv", {"prompts_csv": ["a.csv", "b.csv"]}),
        ("--valid_video_csv a.csv b.csv", {"valid_video_csv": ["a.csv", "b.csv"]}),
        ("--validation_global_seed 7", {"validation_seed": 7}),
        ("--validation_fixed_size 480x864", {"validation_height": 480, "validation_width": 864}),
        ("--validation_fixed_size none", {"validation_height": 0, "validation_width": 0}),
        ("--validation_num_inference_steps 30", {"validation_steps": 30}),
        ("--validate_video_length 121", {"validation_num_frames": 121}),
        ("--validation_video_length 121", {"validation_num_frames": 121}),
        ("--video_length 121 --validate_video_length 121", {"validation_num_frames": 121}),
        ("--validation_timestep_shift 3.0", {"validation_shift": 3.0}),
        ("--validate_at_step0 off", {"validate_at_step0": False}),
        ("--neg_prompt blurry", {"negative_prompt": "blurry"}),
        ("--validation_negative_prompt blurry --neg_prompt blurry", {"negative_prompt": "blurry"}),
        ("--neg_prompt none", {"negative_prompt": ""}),
        ("--use_lora", {"lora_rank": 8, "lora_alpha": 16}),
        ("--use_lora on --lora_r 32", {"lora_rank": 32, "lora_alpha": 16}),
        ("--lora_alpha 4 --lora_rank 2 --use_lora true", {"lora_rank": 2, "lora_alpha": 4}),
        ("--use_lora false --lora_r 32", {"lora_rank": 0}),
        ("--use_lora --lora_dropout 0.0", {"lora_rank": 8}),
        ("--video_fps 16", {"fps": 16}),
        ("--infer_flow_shift_video 7", {"shift": 7}),
        ("--adv_clip_max 3", {"advantage_clip": 3}),
        ("--precision fp32 --vae_precision bf16", {"dtype": "fp32", "vae_dtype": "bf16"}),
        ("--video_bucket_hw_base_size 480", {"height": 352, "width": 624}),
        ("--video_bucket_hw_base_size=640 --height 480", {"height": 480, "width": 864}),
        ("--reward_model videoalign_local", {"reward_model": ["videoalign"]}),
        (
            '--reward_weights {"VQ":0.5,"MQ":0.5,"TA":1.0}',
            {"reward_weights": '{"VQ":0.5,"MQ":0.5,"TA":1.0}'},
        ),
        (
            "--use_muon off --use_same_noise On --enable_fsdp",
            {"use_muon": False, "use_same_noise": True, "enable_fsdp": True},
        ),
    ],
)
def test_a_renamed_flag_sets_the_setting(flags, expected, tmp_path):
    settings = settings_of(*flags.split())
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize(
    "flags, strategy",
    [
        ("", "dual_moving"),
        ("--use_moving_KL --use_dual_kl", "dual_moving"),
        ("--use_moving_KL False", "dual_fixed"),
        ("--use_dual_kl off", "moving"),
        ("--use_moving_KL=0 --use_dual_kl=0", "fixed"),
        ("--use_dual_kl false --kl_weight 0", "none"),
    ],
)
def test_the_switches_of_the_reference_choose_the_kl_strategy(flags, strategy):
    settings = settings_of(*flags.split())
    assert settings["kl_strategy"] == strategy
    assert not settings.keys() & {"use_moving_KL", "use_dual_kl", *NO_SETTINGS}


@pytest.mark.parametrize(
    "content, flags, strategy",
    [
        ("use_moving_KL: false", "", "dual_fixed"),
        ("use_moving_KL: false", "--use_dual_kl false", "fixed"),
        # the config.yaml of a run
        ("kl_strategy: fixed\nuse_dual_kl: true\nuse_moving_KL: true", "", "fixed"),
        ("kl_strategy: fixed", "--use_moving_KL true", "moving"),
        ("kl_strategy: fixed", "--use_dual_kl true", "dual_fixed"),
        ("kl_strategy: stepwise", "--use_moving_KL false", "dual_fixed"),
        ("use_dual_kl: false", "--kl_strategy stepwise", "stepwise"),
        ("use_dual_kl: false\nkl_weight: 0", "--kl_weight 1e-5", "moving"),
    ],
)
def test_a_flag_changes_the_kl_strategy_of_a_file(tmp_path, content, flags, strategy):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    assert settings_of("--config", str(path), *flags.split())["kl_strategy"] == strategy


def test_a_switch_beside_a_kl_strategy_is_reported(capsys):
    assert settings_of("--kl_strategy", "fixed", "--use_dual_kl", "true")["kl_strategy"] == "fixed"
    assert (
        capsys.readouterr().err
        == "ignored flags: use_dual_kl true; kl_strategy chooses the KL terms\n"
    )
    assert "use_dual_kl perhaps is not supported: it must be true or false" in error_of(
        capsys, "--use_dual_kl", "perhaps"
    )


def test_files_may_use_reference_names_and_flags_override_them(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(
        "use_lora: true\ntrain_video_csv: [a.csv, b.csv]\nvideo_fps: 16\nnum_workers: 4\n"
    )
    data = load_config(path).data
    assert (data.prompts_csv, data.fps) == (["a.csv", "b.csv"], 16)
    settings = settings_of("--config", str(path), "--lora_r", "4", "--fps", "8")
    assert (settings["lora_rank"], settings["lora_alpha"], settings["fps"]) == (4, 16, 8)
    assert "ignored flags: num_workers 4; prompts are read once" in capsys.readouterr().err
    path.write_text("lora_rank: 64\n")
    assert settings_of("--config", str(path), "--use_lora")["lora_rank"] == 64
    assert settings_of("--config", str(path), "--use_lora", "no")["lora_rank"] == 0
    path.write_text("fps: 24\nvideo_fps: 16\n")
    with pytest.raises(ValueError, match="run.yaml: fps and video_fps set fps to 24.0 and 16.0"):
        load_config(path)


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--neg_prompt a --validation_negative_prompt b",
            "training and validation share one negative prompt",
        ),
        ("--neg_prompt a --negative_prompt b", "training and validation share one negative prompt"),
        (
            "--prompts_csv a --train_video_csv b",
            "set prompts_csv to ['a'] and ['b']; they are two names of one setting: remove",
        ),
        (
            "--width 640 --video_bucket_hw_base_size 480",
            "set width to 640 and 624; they contradict each other: remove",
        ),
        (
            "--use_lora --lora_r 0",
            "lora_r and use_lora set lora_rank to 0 and 8; they contradict each other",
        ),
        ("--debug true", "unknown flag --debug; --help lists them"),
        ("--neg_prompt -blur", "neg_prompt needs a value; write --neg_prompt=VALUE"),
        ("--neg_prompt", "neg_prompt needs a value"),
        ("--train_video_csv --use_muon", "train_video_csv needs a value"),
        ("--task_type", "task_type needs a value"),
        ("--validation_fixed_size 0x864", "validation_fixed_size 0x864 is not a size"),
        (
            "--config configs/miniature.yaml --task_type i2v",
            "task_type must be t2v for transformer_version miniature, got i2v",
        ),
        (
            "--config configs/miniature.yaml --task_type nonsense",
            "task_type nonsense is not supported: transformer_",
        ),
        (
            "--height 480 --video_bucket_hw_base_size 480",
            "height and video_bucket_hw_base_size set height to 480 and 352",
        ),
        ("--lora_rank 4 --use_lora false", "lora_rank and use_lora set lora_rank to 4 and 0"),
        (
            "--lora_r 4",
            "lora_r 4 has no effect in the reference without use_lora; add use_lora true",
        ),
        ("--use_lora perhaps", "use_lora perhaps is not supported: it must be true or false"),
        (
            "--validation_fixed_size 480",
            "validation_fixed_size 480 is not a size; write height x width",
        ),
        ("--video_bucket_hw_base_size 512", "512 is not supported: the buckets are 480 and 640"),
        ("--precision fp16", "dtype (given as --precision) must be one of bf16, fp32, got 'fp16'"),
        (
            "--validation_prompts cat dog",
            "validation_prompts cat dog is not supported: write the prompts to a CSV",
        ),
        (
            "--video_length 81 --validate_video_length 121",
            "set validation_num_frames to 81 and 121; they",
        ),
        ("--video_fps 8 9", "fps (given as --video_fps) must be a number, got"),
        ("--video_fps many", "fps (given as --video_fps) must be a number, got 'many'"),
        ("--task_type i2v", "task_type must be t2v for transformer_version 480p_t2v, got i2v"),
        (
            "--train_video_csvs a.csv",
            "unknown flag --train_video_csvs; did you mean --train_video_csv?",
        ),
        ("--world_size 8", "--world_size needs --print_config"),
        ("--world_size 0 --print_config", "--world_size must be above 0"),
    ],
)
def test_contradictions_and_invalid_values_raise_a_clear_error(capsys, flags, message):
    err = error_of(capsys, *flags.split())
    assert message in err and "ignored flags" not in err


@pytest.mark.parametrize("word", ["", "none", "None"])
def test_task_type_may_be_empty(capsys, word):
    assert settings_of("--task_type", word) == Config().resolved().flat()
    assert capsys.readouterr().err.startswith(f"ignored flags: task_type {word or chr(34) * 2}; ")


@pytest.mark.parametrize(
    "line, expected",
    [
        ("neg_prompt: no", "neg_prompt) must not be a bool, got false"),
        ("neg_prompt: [a]", "neg_prompt) must be text, got "),
        ("neg_prompt:", {"negative_prompt": ""}),
        ("train_video_csv: []", {"prompts_csv": []}),
        ("train_video_csv: {a: b}", "train_video_csv) must be a list of text, got "),
        (
            "train_video_csv: [1, 2]",
            "train_video_csv) must be text, got '1'",
        ),
        ("train_video_csv:", "train_video_csv) must be a list of text"),
        ("video_fps:", {"fps": 24.0}),
        ("validate_video_length: 121.0", {"validation_num_frames": 121}),
        ("validate_video_length: 121.5", "validate_video_length) must be an integer"),
        ("validation_fixed_size: no", "validation_fixed_size False is not a size"),
        ("use_lora: no", {"lora_rank": 0}),
        ("use_lora:", "use_lora None is not supported: it must be true or false"),
        ("task_type:", {"transformer_version": "480p_t2v"}),
        ("debug_overfit:", {"transformer_version": "480p_t2v"}),
    ],
)
def test_a_value_under_a_reference_name_is_checked_like_the_setting(tmp_path, line, expected):
    path = tmp_path / "run.yaml"
    path.write_text(line)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            load_config(path)
    else:
        settings = load_config(path).flat()
        assert {name: settings[name] for name in expected} == expected


def test_a_message_names_the_given_flag():
    flags = parse(
        "--validate_video_length 16 --adv_clip_max 9 --task_type t2v --fps 8".split()
    ).flags
    message = with_flags(
        "validation_num_frames must be, advantage_clip, the task, fps, sample_n_frames", flags
    )
    named = (
        "validation_num_frames (given as --validate_video_length) must be, advantage_clip (given "
        "as --adv_clip_max)"
    )
    assert message == f"{named}, the task, fps, sample_n_frames"


WITHOUT_EFFECT = [name for name, row in TRAINING.items() if row.no_effect]


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_an_ignored_flag_is_reported_with_the_reason(capsys, monkeypatch, name):
    row, flag = TRAINING[name], name.replace("*", "sampler")
    value = "t2v" if row.values else str(row.only[0]) if row.only else "1"
    assert settings_of(f"--{flag}", value) == Config().resolved().flat()
    assert capsys.readouterr().err == f"ignored flags: {flag} {value}; {row.no_effect}\n"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")  # only rank 0 prints
    settings_of(f"--{flag}={value}")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "flags",
    [
        "--post_train_type standard",
        "--lora_dropout 0.1",
        "--data_type image",
        "--debug_overfit true",
    ],
)
def test_an_unsupported_value_raises_with_the_reason(capsys, flags):
    name = flags.split()[0][2:]
    row = TRAINING["debug_*" if name.startswith("debug") else name]
    assert f"{flags[2:]} is not supported: {row.rejected}" in error_of(capsys, *flags.split())
    assert row.rejected


# --- docs/reference_flags.md ----------------------------------------------------------------------


def quote(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


def line_of(row):
    """Return the cells of the page after the flag."""
    sets = ", ".join(f"`{setting}`" for setting in row.sets)
    values = [
        f"{quote(value)}: {', '.join(f'{k} {v}' if v != '' else f'no {k}' for k, v in of.items())}"
        for value, of in row.values.items()
        if of and TASK not in of
    ]
    accepted = ", ".join(map(quote, row.only)) or (
        '"", none, the version\'s' if row.values else "any value"
    )
    parts = [
        sets + (", height x width" if len(row.sets) == 2 else ""),
        *values,
        "unless given elsewhere" if row.unless_set else "",
        f"needs {row.needs} true" if row.needs else "",
        f"ignored ({accepted}): {row.no_effect}" if row.no_effect else "",
        f"otherwise an error: {row.rejected}" if row.rejected else "",
        row.conflict,
    ]
    return f"| {quote(row.default)} | {'; '.join(filter(None, parts))} |".replace("|  |", "| |")


def lines_of(rows):
    """Return the rows of the page; flags that differ in their name only share one."""
    names = {}
    for name, row in rows.items():
        names.setdefault(line_of(row), []).append(f"`{name}`")
    return "\n".join(f"| {', '.join(names)} {line}" for line, names in names.items())


def test_the_page_has_every_row_and_the_current_defaults():
    page = (ROOT / "docs/reference_flags.md").read_text()
    for rows in (TRAINING, GENERATION):
        assert lines_of(rows) in page, lines_of(rows)
    differing = re.findall(
        r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", page[page.index("## Defaults") :], re.MULTILINE
    )
    assert len(differing) >= 12
    defaults = Config().flat()
    for name, here in differing:
        value = defaults[name]
        text = " ".join(value) if isinstance(value, list) else value
        assert (str(text).lower() if text not in ("", None) else "none") == here, name
