"""Settings from flags and files: both accept the same values, and unknown names raise a clear
error.
"""

import json
import re
import subprocess

import pytest
import yaml

from hyvideo.records.run_config import write_config
from hyvideo.settings.command_line import load_config, parse
from hyvideo.settings.config import LEAVES, OBJECTIVE, SHARED
from hyvideo.settings.identity import changed_settings
from hyvideo.settings.objectives import BUILT_IN
from hyvideo.settings.reward_settings import reward_options, reward_weights
from hyvideo.settings.sections import RewardSettings
from tests.forked import LIGHT, ROOT, python


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
    "text, named",
    [
        ("etta: 0.7", "etta eta"),
        ("objective: grpo\nnft_levels: 2", "nft_levels nft grpo"),
        ("enable_fsdp: perhaps", "enable_fsdp"),
        ("eta: {a: 1}", "eta"),
        ("batch_size: 2.5", "batch_size 2.5"),
        ("- eta", "run.yaml"),
        ("eta: [", "run.yaml"),
        ("eta: 0.5\neta: 0.6", "run.yaml line 2 eta"),
    ],
)
def test_a_mistake_in_a_file_exits_with_code_2_and_is_named(write, capsys, text, named):
    error = error_of(capsys, "--config", write(text))
    assert [word for word in named.split() if word not in error] == []


@pytest.mark.parametrize(
    "argv, named",
    [
        ("--etta 1", "--etta --eta?"),
        ("--sde_type flow", "sde_type flow_grpo"),
        ("--eta", "--eta"),
        ("--learning 1", "--learning"),  # no abbreviations
        ("--config nowhere.yaml", "nowhere.yaml"),
        ("--nft_levels 2", "nft_levels nft"),
        ("--eta -1 --batch_size two", "eta batch_size"),  # all at once
    ],
)
def test_a_mistake_in_the_flags_exits_with_code_2_and_is_named(capsys, argv, named):
    error = error_of(capsys, *argv.split())
    assert [word for word in named.split() if word not in error] == []


@pytest.mark.parametrize("flags", ["--eta -1", "--objective nft --help"])
def test_mistakes_and_help_are_answered_without_torch(flags):
    program = (
        "import sys; sys.argv = ['post_train.py', *sys.argv[1:]]\n"
        "from hyvideo.settings.command_line import parse\n"
        "try: parse()\n"
        "except SystemExit as ended: print(ended.code)\n"
        "print('torch' in sys.modules)"
    )
    command = [python(LIGHT), "-c", program, "--config", "configs/smoke.yaml", *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    code = "0" if "--help" in flags else "2"
    assert done.stdout.splitlines()[-2:] == [code, "False"], done


def test_another_objective_drops_the_settings_of_the_file_with_a_note(write, capsys):
    path = write("objective: nft\nnft_levels: 2\nkl_weight: 1e-3\n")
    settings = parse(["--config", path, "--objective", "grpo"]).config.flat()
    assert "nft_levels" not in settings and settings["kl_weight"] == 1e-3
    assert "nft_levels" in capsys.readouterr().err
    assert load_config(path, objective="grpo").flat() == settings
    assert parse(["--config", path]).config.flat()["nft_levels"] == 2
    assert capsys.readouterr().err.count("nft_levels") == 1  # of load_config


OWN = """
from hyvideo.settings.sections import Section, learning
from hyvideo.training.objectives.nft import NFT

class Own(NFT):
    class Settings(Section):
        temperature: float = learning(2.0, "Temperature of the weights.", gt=0)
"""


def test_a_custom_objective_has_settings_of_its_own(tmp_path, write, capsys):
    (tmp_path / "own.py").write_text(OWN)
    objective = f"{tmp_path}/own.py:Own"
    config = parse(["--objective", objective]).config
    assert config.objective.temperature == config.flat()["temperature"] == 2.0
    assert config.objective.nft_levels == 4
    path = write(f"objective: {objective}\ntemperature: 3\n")
    assert load_config(path).objective.temperature == 3.0
    flags = ["--config", path, "--temperature", "0.5"]
    assert parse(flags).config.objective.temperature == 0.5
    assert "temperature" in error_of(capsys, "--objective", objective, "--temperature", "-1")
    assert "temperature" in error_of(capsys, "--objective", objective, "--temperatur", "1")
    with pytest.raises(SystemExit):
        parse(["--objective", objective, "--help"])
    assert "Temperature of the weights. (default: 2.0)" in capsys.readouterr().out
    leaf = config.leaves()["temperature"]
    assert leaf.decides == "learning"
    changed = changed_settings(
        config.flat(), config.with_settings(temperature=3.0).flat(), same_rollouts=True
    )
    assert list(changed.affecting_learning) == ["temperature"]


@pytest.mark.parametrize(
    "argv, values",
    [
        (["--enable_fsdp"], {"enable_fsdp": True}),
        (["--report", "no"], {"report": False}),
        (["--report=0", "--betas", "0.9", "0.95"], {"report": False, "betas": [0.9, 0.95]}),
        (["--report_to", "tensorboard", "wandb"], {"report_to": ["tensorboard", "wandb"]}),
        (["--kl_target", "1e-3", "--sde_window="], {"kl_target": 1e-3, "sde_window": ""}),
    ],
)
def test_flags_accept_the_forms_of_the_reference(argv, values):
    settings = parse(argv).config.flat()
    assert {name: settings[name] for name in values} == values


def test_yaml_numbers_are_decimal_and_dates_are_text(write):
    path = write(
        "seed: 12\nlearning_rate: 1e-5\neta: .5\nkl_weight: 1e3\noutput_dir: 2026-01-01\n"
        "report: on\n"
    )
    settings = load_config(path).flat()
    given = {
        "seed": 12,
        "learning_rate": 1e-5,
        "eta": 0.5,
        "kl_weight": 1000.0,
        "output_dir": "2026-01-01",
    }
    assert {name: settings[name] for name in given} == given and settings["report"] is True
    assert load_config(write("seed: 010\n")).data.seed == 10
    with pytest.raises(ValueError, match="height.* integer"):
        load_config(write("height: 1:30\n"))


@pytest.mark.parametrize("where", ["file", "flag"])
def test_a_removed_setting_is_ignored_with_a_line_on_stderr(write, capsys, where):
    path = write("spool_rounds: 1\nseed: 3\n")
    argv = ["--config", path] if where == "file" else ["--spool_rounds=1", "--seed=3"]
    assert parse(argv).config.data.seed == 3
    assert capsys.readouterr().err.count("spool_rounds") == 1


def test_help_lists_the_settings_with_those_of_the_objective(capsys):
    objective = "nft"
    with pytest.raises(SystemExit) as exit_:
        parse(["--objective", objective, "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    own = BUILT_IN[objective].model_fields
    for name in LEAVES:
        is_listed = name in SHARED or name == OBJECTIVE or name in own
        assert len(re.findall(rf"^  --{name} ", text, re.MULTILINE)) == is_listed, name


def test_reward_weights_are_a_preset_or_json(write):
    for text, weights in (
        ("reward_weights: B", {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}),
        ("reward_weights: {VQ: 1, TA: 2}", {"VQ": 1, "TA": 2}),
        (
            "reward_weights: {videoalign: {VQ: 1, TA: 2}, CLIPScore: 3}",
            {"VQ": 1, "TA": 2, "CLIPScore": 3},
        ),
    ):
        assert reward_weights(parse(["--config", write(text)]).config.reward) == weights


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
    assert reward_options(reward) == {"videoalign": {"batch_size": 2}}
    for config in (of_reference, '{"clip": {}}', "{", '{"miniature": 3}'):
        wrong = RewardSettings(reward_model=["miniature"], reward_config=config)
        with pytest.raises(ValueError, match="reward_config"):
            reward_options(wrong)


def test_the_config_of_a_run_can_be_loaded(tmp_path, tiny_config):
    import torch

    write_config(tmp_path, tiny_config.flat(), torch.device("cpu"), world_size=1)
    assert "revision" in yaml.safe_load((tmp_path / "config.yaml").read_text())["environment"]
    assert load_config(tmp_path / "config.yaml") == tiny_config


def test_a_strategy_of_the_flags_needs_a_weight_where_the_file_has_none(tmp_path, capsys):
    file = tmp_path / "no_kl.yaml"
    file.write_text("kl_weight: 0\nkl_strategy: none\n")
    flags = ["--config", str(file), "--kl_strategy", "fixed"]
    with pytest.raises(SystemExit):
        parse(flags)
    assert "kl_weight" in capsys.readouterr().err
    assert parse([*flags, "--kl_weight", "0.1"]).config.objective.strategy == "fixed"
    assert parse([*flags, "--kl_weight", "0"]).config.objective.strategy == "none"
