"""Entries of reward_model: scorers with their weights and options in one place."""

import json

import pytest

from hyvideo.settings.command_line import load_config, parse
from hyvideo.settings.config import Config
from hyvideo.settings.reward_settings import given_reward_weights, reward_options, reward_problems

ENTRIES = [
    {"name": "videoalign", "weight": {"VQ": 0.25, "TA": 1.5}, "options": {"precision": "fp32"}},
    {"name": "remote", "weight": {"beauty": 0.125}, "options": {"url": "http://gpu12:8000"}},
]
WEIGHTS = {"videoalign": {"VQ": 0.25, "TA": 1.5}, "remote": {"beauty": 0.125}}
OPTIONS = {"videoalign": {"precision": "fp32"}, "remote": {"url": "http://gpu12:8000"}}


def check_entries(config):
    assert config.reward.reward_model == ["videoalign", "remote"]
    assert given_reward_weights(config.reward) == WEIGHTS
    assert reward_options(config.reward) == OPTIONS


def test_entries_of_a_file_and_of_flags_are_the_three_settings(tmp_path):
    path = tmp_path / "run.yaml"
    lines = ["reward_model:"]
    lines += [f"- {json.dumps(entry)}" for entry in ENTRIES]
    path.write_text("\n".join(lines))
    check_entries(load_config(path))
    check_entries(parse(["--reward_model", *map(json.dumps, ENTRIES)]).config)
    # flags replace the entries of a file with their weights and options
    config = parse(["--config", str(path), "--reward_model", "clip"]).config
    assert config.reward.reward_model == ["clip"]
    assert config.reward.reward_weights == "alignment" and config.reward.reward_config == ""


def test_recorded_settings_read_as_entries_give_the_same_run():
    config = Config.from_flat({"reward_model": ENTRIES})
    check_entries(Config.from_flat(config.flat()))


def test_a_number_weights_each_dimension_of_its_scorer(tmp_path):
    (tmp_path / "own.py").write_text("def light(videos, prompts, fps): ...\n")
    function = f"{tmp_path / 'own.py'}:light"
    entries = [
        {"name": "videoalign", "weight": 0.75},
        {"name": "clip", "weight": {"CLIPScore": 2.0}},
        {"name": function, "weight": -0.5},
    ]
    config = Config.from_flat({"reward_model": entries}).resolved()
    assert given_reward_weights(config.reward) == {
        "videoalign": {"VQ": 0.75, "MQ": 0.75, "TA": 0.75},
        "clip": {"CLIPScore": 2.0},
        function: {"light": -0.5},
    }


def test_the_weight_of_a_service_is_by_dimension():
    config = Config.from_flat({"reward_model": [{"name": "remote", "weight": 0.75}]}).resolved()
    (problem,) = reward_problems(config.reward)
    assert problem.startswith("the weight of remote must be by dimension")


def test_entries_without_weights_use_reward_weights():
    entries = ["videoalign", {"name": "remote", "options": {"url": "http://a:1"}}]
    config = Config.from_flat({"reward_model": entries, "reward_weights": "averaged"})
    assert config.reward.reward_model == ["videoalign", "remote"]
    assert config.reward.reward_weights == "averaged"
    assert reward_options(config.reward)["remote"] == {"url": "http://a:1"}


def test_a_single_entry_and_options_beside_those_of_reward_config():
    config = Config.from_flat(
        {
            "reward_model": {"name": "remote", "options": {"url": "http://a:1"}},
            "held_out_reward_model": ["clip", {"name": "pickscore", "options": {"path": "p"}}],
            "reward_config": {"clip": {"path": "c"}},
        }
    )
    assert reward_options(config.reward) == {
        "remote": {"url": "http://a:1"},
        "clip": {"path": "c"},
        "pickscore": {"path": "p"},
    }


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"reward_model": [{"nam": "clip"}]}, "an entry of reward_model must have a name"),
        ({"reward_model": ['{"name": ']}, "an entry of reward_model must have a name"),
        ({"reward_model": [{"name": "clip", "weight": 1}, "videoalign"]}, "none for videoalign"),
        (
            {"reward_model": [{"name": "clip", "weight": 1}], "reward_weights": "averaged"},
            "got both",
        ),
        (
            {"reward_model": [{"name": "clip", "options": {}, "weight": "high"}]},
            "weight",
        ),
        (
            {
                "reward_model": [{"name": "clip", "options": {"path": "c"}}],
                "reward_config": "a.yaml",
            },
            "got both",
        ),
        ({"held_out_reward_model": [{"name": "clip", "weight": 1}]}, "has no weights"),
    ],
)
def test_wrong_entries_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Config.from_flat(changes)
