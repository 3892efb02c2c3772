"""Settings that must agree for a resumed run, an experiment and an evaluation."""

import json

from hyvideo.settings.config import LEAVES
from hyvideo.settings.identity import changed_settings, evaluation_settings, experiment_settings

MACHINE = set(
    "pretrained_model_root precompute_conditions conditions_dir device num_threads vae_tile_size "
    "vae_tile_overlap batched_forward decode_batch_size reward_offload reward_retries check_reward "
    "max_missing_fraction vae_offload score_between_stages attention_kernel remote_reward_url "
    "remote_reward_timeout mini_batch_size_per_update gate_interval gate_tolerance "
    "reference_mode_offload max_steps max_bad_updates sp_size dp_replicate enable_fsdp "
    "reshard_after_forward gradient_sync enable_gradient_checkpointing activation_checkpointing "
    "enable_compile compile_backend deterministic collective_timeout watchdog_seconds".split()
)
RECORDS = set(
    "valid_video_csv output_dir report_to report save_interval save_minutes save_total_limit "
    "keep_every save_asynchronously log_video_interval log_num_videos validation_interval "
    "validation_steps validation_seed validation_repeats validation_batch_size "
    "validation_num_frames validation_eta validation_shift validation_cfg_scale validate_at_step0 "
    "validation_height validation_width on_reward_hacking hacking_threshold held_out_reward_model".split()
)
MEASURED = set(
    "transformer_version dtype encoder_dtype vae_dtype vae_tile_size vae_tile_overlap "
    "random_weights reward_weights height width sample_n_frames fps shift sigmas cfg_scale "
    "guidance_interval reward_model reward_precision reward_video remote_reward_url "
    "validation_steps validation_seed validation_repeats validation_eta negative_prompt".split()
)


def test_every_setting_is_in_the_list_of_what_it_affects(tiny_config):
    """Moving a setting to another list changes which runs count as the same, so the lists are
    repeated here.
    """
    decides = {name: traits.decides for name, traits in LEAVES.items()}
    assert {name for name, kind in decides.items() if kind == "machine"} == MACHINE
    assert {name for name, kind in decides.items() if kind == "records"} == RECORDS
    assert {name for name, kind in decides.items() if kind == "layout"} == {
        "batch_size",
        "gradient_accumulation_steps",
    }
    assert {name for name, kind in decides.items() if kind == "start"} == {
        "resume_from_checkpoint",
        "allow_changed_settings",
    }
    assert set(evaluation_settings(tiny_config.flat())) == MEASURED


def changes(config, same_rollouts=True, **others):
    saved = json.loads(json.dumps(config.flat()))
    return changed_settings(
        saved, config.with_settings(**others).flat(), same_rollouts=same_rollouts
    )


def test_a_resumed_run_may_change_the_machine_but_not_the_method(tiny_config):
    found = changes(
        tiny_config,
        gate_interval=7,
        sp_size=2,
        log_num_videos=9,
        eta=0.1,
        resume_from_checkpoint="outputs/a",
        allow_changed_settings=["eta"],
    )
    assert list(found.free) == ["gate_interval", "sp_size", "log_num_videos"]
    assert found.affecting_learning == {"eta": "eta is 0.1 and was 0.7"}


def test_the_layout_may_change_if_the_number_of_rollouts_stays(tiny_config):
    assert not changes(tiny_config, batch_size=4).affecting_learning
    assert list(changes(tiny_config, False, batch_size=4).affecting_learning) == ["batch_size"]


def test_removed_settings_and_new_settings_at_their_default_are_no_change(tiny_config):
    now = tiny_config.flat()
    saved = {name: value for name, value in now.items() if name != "gate_interval"}
    saved["spool_rounds"] = 1
    assert changed_settings(saved, now, same_rollouts=True) == ({}, {})


def test_settings_that_may_change_on_resume_do_not_define_the_experiment(tiny_config):
    same = {
        "gate_interval": 9,
        "vae_tile_size": 0,
        "mini_batch_size_per_update": 1,
        "pretrained_model_root": "b",
    }
    assert experiment_settings(tiny_config.with_settings(**same)) == experiment_settings(
        tiny_config
    )
    assert experiment_settings(tiny_config.with_settings(eta=0.1)) != experiment_settings(
        tiny_config
    )


def test_an_experiment_is_identified_by_its_kl_strategy(tiny_config):
    assert experiment_settings(tiny_config)["kl_strategy"] == "dual_moving"
    without = experiment_settings(tiny_config.with_settings(kl_weight=0.0, kl_coef=0.5))
    assert without["kl_strategy"] == "none" and "kl_coef" not in without
    assert without == experiment_settings(tiny_config.with_settings(kl_weight=0.0))
