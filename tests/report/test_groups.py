"""Rewards, seeds, sweeps and settings of the runs of a page."""

from pathlib import Path

import pytest

from hyvideo.config.command_line import load_config
from hyvideo.report.groups import differing_settings, reward_of, seed_groups, setting_text, sweep_of


def configs_of(**settings_by_name):
    return {
        name: load_config("configs/miniature.yaml", **settings)
        for name, settings in settings_by_name.items()
    }


def groups_of(configs, place="outputs"):
    return seed_groups(configs, {name: Path(place, name) for name in configs})


def test_runs_that_differ_in_seed_machine_and_records_are_a_group_named_without_the_seed():
    configs = configs_of(
        **{
            "sage-seed0": {"seed": 0, "output_dir": "a"},
            "sage-seed1": {"seed": 1, "output_dir": "b", "num_threads": 1, "save_interval": 5},
            "other": {"seed": 2, "eta": 0.5},
        }
    )
    assert groups_of(configs) == {"sage-seed0": "sage", "sage-seed1": "sage", "other": "other"}


def test_different_recipes_of_one_name_are_not_a_group():
    configs = configs_of(
        **{"run-seed0": {"eta": 0.5}, "run-seed1": {"seed": 1}, "run_seed2": {"seed": 2}}
    )
    assert groups_of(configs) == {
        "run-seed0": "run",
        "run-seed1": "run (2)",
        "run_seed2": "run (2)",
    }


def test_equal_runs_of_two_sweeps_are_two_groups():
    configs = configs_of(a={}, b={"seed": 1})
    folders = {"a": Path("one/cells/a"), "b": Path("two/cells/b")}
    assert len({*seed_groups(configs, folders).values()}) == 2
    assert sweep_of(folders["a"]) == Path("one") and sweep_of(Path("outputs/a")) is None


@pytest.mark.parametrize(
    "change",
    [
        {"reward_weights": "averaged"},
        {"reward_model": "miniature"},
        {"reward_normalization": "group"},
    ],
)
def test_rewards_with_other_scorers_weights_or_normalization_differ(change):
    configs = configs_of(first={}, second=change, third={"eta": 0.1})
    assert reward_of(configs["first"]) != reward_of(configs["second"])
    assert reward_of(configs["first"]) == reward_of(configs["third"])


def test_only_settings_with_several_values_are_compared():
    first = {"output_dir": "a", "eta": 0.5, "num_threads": 1}
    configs = configs_of(first=first, second={"output_dir": "b", "seed": 3})
    assert differing_settings(configs) == ["seed", "eta", "num_threads"]  # the machine's are last
    assert differing_settings({}) == []


def test_settings_are_readable_text():
    values = [None, "", True, 1e-4, 0.70000, ["a", "b"], {"VQ": 1.0, "MQ": 0.5}, 3, "<b>"]
    assert [setting_text(value) for value in values] == [
        *("–", "–", "true", "0.0001", "0.7", "a, b", "VQ 1, MQ 0.5", "3", "<b>")
    ]
