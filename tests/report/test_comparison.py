"""The comparison page, from records and from short runs of the commands, in a browser."""

import json

import pytest

from hyvideo.report.comparison import (
    differing_settings,
    read_comparison,
    reward_of,
    with_runs_below,
)
from hyvideo.settings.command_line import load_config
from hyvideo.validation.scores_file import Evaluation, write_evaluation
from scripts import report
from tests.report.recorded_runs import record_run


@pytest.fixture
def recorded(tmp_path):
    """Records of two runs, and an evaluation of the guided base model."""
    record_run(tmp_path / "sage", gains=(0.2, 0.3))
    record_run(tmp_path / "other", gains=(-0.1, 0.3))
    videos = [
        {"number": k, "prompt": str(k), "group": k, "reward": 0.6, "VQ": 0.1 * k} for k in range(4)
    ]
    write_evaluation(
        tmp_path / "guided base" / "scores.json", Evaluation(videos, {"true/VQ": 0.4}), {}
    )


def test_runs_of_one_base_model_share_its_column_and_others_have_their_own(recorded, tmp_path):
    folders = [tmp_path / name for name in ("sage", "other", "guided base")]
    scores = read_comparison(folders).scores
    assert [*scores] == ["base model", "sage", "other", "guided base"]
    assert scores["sage"]["reward"]["mean"] == pytest.approx(0.35 + 0.25)
    assert scores["sage"]["reward"]["low"] < 0.6 < scores["sage"]["reward"]["high"]
    assert scores["sage"]["true/VQ"] == {"mean": pytest.approx(0.4), "low": None, "high": None}
    assert scores["guided base"]["VQ"]["mean"] == pytest.approx(0.15)
    path = tmp_path / "other/samples/000000/scores.json"
    entries = json.loads(path.read_text())
    path.write_text(json.dumps([entry | {"reward": 0.0} for entry in entries]))
    assert [*read_comparison(folders).scores][2] == "base model of other"


def test_a_file_that_cannot_be_read_is_named(tmp_path, exit_code, capsys):
    for content, message in (
        ("[]", "must contain a JSON object, got list"),
        ("{", "is not valid JSON"),
    ):
        (tmp_path / "scores.json").write_text(content)
        assert exit_code(report.main, tmp_path, "--output_path", tmp_path / "page.html") == 2
        printed = capsys.readouterr().err
        assert str(tmp_path) in printed and message in printed


def test_a_folder_of_no_kind_stands_for_the_runs_below_it(recorded, tmp_path):
    record_run(tmp_path / "more" / "deep" / "third")
    runs = [tmp_path / "more/deep/third", tmp_path / "other", tmp_path / "sage"]
    assert with_runs_below([tmp_path]) == runs
    assert with_runs_below([tmp_path / "sage", tmp_path / "guided base"]) == [
        tmp_path / "sage",
        tmp_path / "guided base",
    ]
    assert with_runs_below([tmp_path / "empty"]) == [tmp_path / "empty"]


def configs_of(**settings_by_name):
    return {
        name: load_config("configs/miniature.yaml", **settings)
        for name, settings in settings_by_name.items()
    }


@pytest.mark.parametrize(
    "change",
    [{"reward_model": "miniature"}, {"reward_normalization": "group"}],
)
def test_rewards_with_other_scorers_weights_or_normalization_differ(change):
    configs = configs_of(first={}, second=change, third={"eta": 0.1})
    assert reward_of(configs["first"].reward) != reward_of(configs["second"].reward)
    assert reward_of(configs["first"].reward) == reward_of(configs["third"].reward)


def test_only_settings_with_several_values_are_compared():
    first = {"output_dir": "a", "eta": 0.5, "num_threads": 1}
    configs = configs_of(first=first, second={"output_dir": "b", "seed": 3})
    assert differing_settings(configs) == ["seed", "eta", "num_threads"]  # the machine's are last
    assert differing_settings({}) == []
