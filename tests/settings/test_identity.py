"""Settings that must agree for a resumed run, an experiment and an evaluation."""

import json

from hyvideo.settings.command_line import load_config
from hyvideo.settings.config import LEAVES
from hyvideo.settings.identity import changed_settings, evaluation_settings, experiment_settings


def test_an_evaluation_is_identified_by_what_it_measures(tiny_config):
    """Another value of these settings is another evaluation; test_names.py has the list."""
    settings = evaluation_settings(tiny_config)
    measured = {name for name, leaf in LEAVES.items() if leaf.measured}
    assert settings.keys() == measured
    frames = evaluation_settings(tiny_config.with_settings(validation_num_frames=1))
    assert (frames["sample_n_frames"], settings["sample_n_frames"]) == (1, 5)
    assert evaluation_settings(tiny_config.with_settings(learning_rate=1.0)) == settings


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


def test_a_resumed_run_has_the_defaults_of_its_objective():
    now = load_config("configs/miniature_draft.yaml").flat()
    saved = {name: value for name, value in now.items() if name != "gate_interval"}
    assert changed_settings(saved, now, same_rollouts=True) == ({}, {})


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
