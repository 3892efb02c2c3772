"""Settings from flags and files: both accept the same values, and unknown names raise a clear
error.
"""

import json
import re
from dataclasses import replace

import pytest
import yaml

from hyvideo.records.run_files import write_config
from hyvideo.settings.command_line import load_config, parse
from hyvideo.settings.config import LEAVES, SECTIONS
from hyvideo.settings.reward_settings import reward_options


@pytest.fixture
def write(tmp_path):
    """Write a YAML file and return its path."""

    def _write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return _write


def error_of(capsys, *argv):
    with pytest.raises(SystemExit) as exit_:
        parse(list(argv))
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_a_flag_overrides_the_file_and_the_file_the_default(write):
    path = write("eta: 0.7\nlearning_rate: 3e-5\nuse_dual_kl: false\nreport_to: [none]\n")
    config = parse(["--config", path, "--eta", "0.9"]).config
    assert (config.rollout.eta, config.optimizer.learning_rate, config.rollout.shift) == (
        0.9,
        3e-5,
        5.0,
    )
    assert config.objective.strategy == "moving" and config.record.report_to == ["none"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("etta: 0.7", "unknown setting 'etta'; did you mean eta?"),
        ("zzz: 0.7", "unknown setting 'zzz'; --help lists the settings"),
        ("use_muon: perhaps", "invalid bool value: 'perhaps' (choose from true, false)"),
        ("report_to: [none, 1]", "must be a list of strings, got the element '1'"),
        ("eta: 0.5\neta: 0.6", "line 2 repeats 'eta'"),
        ("on_reward_hacking: rollback", "invalid choice: 'rollback' (choose from warn, stop)"),
        ("eta: lots", "invalid float value: 'lots'"),
        ("eta: {a: 1}", "must be a single value, got a mapping"),
        ("eta: [1, 2]", "must be a single value, got a list"),
        ("eta:", "must be a single value, got nothing"),
        ("batch_size: 2.5", "must be an integer, got 2.5"),
        ("sde_type: euler", "invalid choice: 'euler'"),
        ("- eta", "must contain `name: value` lines, got list"),
        ("eta: [", "is not valid YAML"),
    ],
)
def test_an_invalid_file_exits_with_code_2(write, capsys, text, message):
    assert message in error_of(capsys, "--config", write(text))


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--etta", "1"], "unknown flag --etta; did you mean --eta?"),
        (
            ["--sde_type", "flow"],
            " or FILE.py:NAME); did you mean flow_grpo?",
        ),
        (["--batch_size", "two"], "invalid int value: 'two'"),
        (["--use_muon", "perhaps"], "invalid bool value"),
        (["--eta", "0.5", "0.6"], "unknown flag 0.6"),
        (["--eta"], "expected one argument"),
        (["--learning", "1"], "unknown flag --learning"),  # no abbreviations
        (["--config", "nowhere.yaml"], "must be a readable YAML file"),
        (["--config", ""], "--config '' must be a readable YAML file: it does not exist"),
    ],
)
def test_an_invalid_command_line_exits_with_code_2(capsys, argv, message):
    assert message in error_of(capsys, *argv)


@pytest.mark.parametrize(
    "argv, values",
    [
        (["--use_muon"], {"use_muon": True}),
        (["--use_muon", "no"], {"use_muon": False}),
        (["--use_muon=0", "--enable_fsdp", "True"], {"use_muon": False, "enable_fsdp": True}),
        (["--learning_rate=3e-5", "--shift", "7"], {"learning_rate": 3e-5, "shift": 7.0}),
        (["--report_to", "tensorboard", "wandb"], {"report_to": ["tensorboard", "wandb"]}),
        (["--kl_target", "1e-3", "--match_noise="], {"kl_target": 1e-3, "match_noise": ""}),
    ],
)
def test_flags_accept_the_forms_of_the_reference(argv, values):
    settings = parse(argv).config.flat()
    assert {name: settings[name] for name in values} == values


def test_yaml_numbers_are_decimal_and_dates_are_text(write):
    path = write(
        "seed: 12\nlearning_rate: 1e-5\neta: -.5\nkl_weight: 1e3\noutput_dir: 2026-01-01\n"
        "use_muon: on\n"
    )
    settings = load_config(path).flat()
    given = {
        "seed": 12,
        "learning_rate": 1e-5,
        "eta": -0.5,
        "kl_weight": 1000.0,
        "output_dir": "2026-01-01",
    }
    assert {name: settings[name] for name in given} == given and settings["use_muon"] is True
    assert load_config(write("seed: 010\n")).data.seed == 10
    with pytest.raises(ValueError, match="invalid int value: '1:30'"):
        load_config(write("height: 1:30\n"))


@pytest.mark.parametrize("where", ["load_config", "file", "flag"])
def test_a_removed_setting_is_ignored_with_a_line_on_stderr(write, capsys, where):
    path = write("spool_rounds: 1\nseed: 3\n")
    argv = ["--config", path] if where == "file" else ["--spool_rounds=1", "--seed=3"]
    config = load_config(path) if where == "load_config" else parse(argv).config
    assert config.data.seed == 3
    message = capsys.readouterr().err
    assert (
        message.count("\n") == 1 and "ignored flags: spool_rounds 1; a removed setting" in message
    )


def test_help_lists_every_flag_once_by_section(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(["--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert text.splitlines()[1] == "" and "[--setting value ...]" in text.splitlines()[0]
    for name in LEAVES:
        assert len(re.findall(rf"^  --{name} ", text, re.MULTILINE)) == 1, name
    titles = re.findall(r"^(\w+): [A-Z]", text, re.MULTILINE)
    assert titles == list(SECTIONS)
    assert "Noise scale of the SDE. (default: 0.5)" in text


def test_reward_weights_are_a_preset_or_json(write):
    assert load_config("configs/smoke.yaml").reward_weights == {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}
    path = write("reward_weights: {VQ: 1, TA: 2}\n")
    assert parse(["--config", path]).reward_weights(config.reward) == {"VQ": 1, "TA": 2}
    path = write("reward_weights: {videoalign: {VQ: 1, TA: 2}, CLIPScore: 3}\n")
    assert parse(["--config", path]).reward_weights(config.reward) == {
        "VQ": 1,
        "TA": 2,
        "CLIPScore": 3,
    }


def test_prompts_csv_accepts_one_or_several_files(write):
    assert parse([]).config.data.prompts_csv == ["assets/prompts/train.csv"]
    assert parse(
        ["--prompts_csv", "a.csv", "b.csv", "--valid_video_csv", ""]
    ).config.data.prompts_csv == [
        "a.csv",
        "b.csv",
    ]
    data = load_config(write("prompts_csv: a.csv\nvalid_video_csv: [b.csv, c.csv]\n")).data
    assert (data.prompts_csv, data.valid_video_csv) == (["a.csv"], ["b.csv", "c.csv"])
    assert load_config("configs/smoke.yaml", valid_video_csv="").data.valid_video_csv == []


def test_scorer_options_are_a_file_or_json(write, tmp_path):
    options = {"miniature": {"path": "here"}}
    (tmp_path / "options.yaml").write_text("miniature: {path: here}\n")
    for text in (str(tmp_path / "options.yaml"), json.dumps(options)):
        reward = parse(["--reward_model", "miniature", "--reward_config", text]).config.reward
        assert reward_options(reward) == options
    reward = load_config(
        write("reward_model: miniature\nreward_config: {miniature: {path: here}}\n")
    ).reward
    assert reward_options(reward) == options
    of_reference = '{"videoalign_local": {"batch_size": 2}}'
    reward = parse(
        ["--reward_model", "videoalign_local", "--reward_config", of_reference]
    ).config.reward
    assert reward_options(reward) == {"videoalign": {"precision": "bf16", "batch_size": 2}}
    reward = replace(reward, reward_model=["miniature"])
    with pytest.raises(
        ValueError, match="must map miniature to a mapping of options, got 'videoalign_local'"
    ):
        reward_options(replace(reward, reward_config=of_reference))
    with pytest.raises(ValueError, match="must map miniature to a mapping of options, got 'clip'"):
        reward_options(replace(reward, reward_config='{"clip": {}}'))
    with pytest.raises(ValueError, match="reward_config .*got {"):
        reward_options(replace(reward, reward_config="{"))


def test_the_config_of_a_run_can_be_loaded(tmp_path, tiny_config):
    import torch

    write_config(tmp_path, tiny_config.flat(), torch.device("cpu"), world_size=1)
    assert "revision" in yaml.safe_load((tmp_path / "config.yaml").read_text())["environment"]
    assert load_config(tmp_path / "config.yaml") == tiny_config
