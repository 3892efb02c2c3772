"""Settings: one path for file and flags, and a clear refusal of what they do not know."""

import pytest
import yaml

from hyvideo.config.settings import load_config, parse
from hyvideo.records.run_files import write_config


@pytest.fixture
def write(tmp_path):
    """Writes a YAML file and gives its path."""

    def _write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return _write


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as exit_:
        parse(list(argv))
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_a_flag_overrides_the_file_and_the_file_the_default(write):
    path = write("eta: 0.7\nlearning_rate: 3e-5\nuse_dual_kl: false\nreport_to: [none]\n")
    config = parse(["--config", path, "--eta", "0.9"]).config
    assert (config.rollout.eta, config.optimizer.learning_rate, config.rollout.shift) == (0.9, 3e-5, 5.0)
    assert config.trust_region.use_dual_kl is False and config.record.report_to == ["none"]


@pytest.mark.parametrize(
    "text, said",
    [
        ("etta: 0.7", "unknown setting 'etta'"),
        ("eta: lots", "invalid float value: 'lots'"),
        ("eta: {a: 1}", "takes one value, got a mapping"),
        ("eta: [1, 2]", "takes one value, got a list"),
        ("eta:", "takes one value, got nothing"),
        ("batch_size: 2.5", "takes a whole number, got 2.5"),
        ("sde_type: euler", "invalid choice: 'euler'"),
        ("- eta", "must hold `name: value` lines, got list"),
        ("eta: [", "is not valid YAML"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_code_2(write, capsys, text, said):
    assert said in refused(capsys, "--config", write(text))


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--etta", "1"], "unknown flag --etta"),
        (["--eta"], "expected one argument"),
        (["--learning", "1"], "unknown flag --learning"),  # no abbreviations
        (["--config", "nowhere.yaml"], "must name a readable YAML file"),
    ],
)
def test_a_command_line_with_a_mistake_is_refused_with_code_2(capsys, argv, said):
    assert said in refused(capsys, *argv)


@pytest.mark.parametrize(
    "flags, strategy",
    [
        ({}, "dual_moving"),
        ({"use_moving_KL": False}, "dual_fixed"),
        ({"use_dual_kl": False}, "moving"),
        ({"use_dual_kl": False, "use_moving_KL": False}, "fixed"),
        ({"kl_weight": 0.0}, "none"),
        ({"kl_strategy": "stepwise"}, "stepwise"),
    ],
)
def test_the_flags_of_the_reference_say_the_strategy(flags, strategy):
    assert load_config("configs/smoke.yaml", **flags).kl_strategy == strategy


def test_reward_weights_are_a_preset_or_json(write):
    assert load_config("configs/smoke.yaml").reward_weights == {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}
    path = write("reward_weights: {VQ: 1, TA: 2}\n")
    assert parse(["--config", path]).config.reward_weights == {"VQ": 1, "TA": 2}
    path = write("reward_weights: {videoalign: {VQ: 1, TA: 2}, CLIPScore: 3}\n")
    assert parse(["--config", path]).config.reward_weights == {"VQ": 1, "TA": 2, "CLIPScore": 3}


def test_the_config_that_a_run_leaves_reads_back(tmp_path, tiny_config):
    import torch

    write_config(tmp_path, tiny_config.flat(), torch.device("cpu"), world_size=1)
    assert "revision" in yaml.safe_load((tmp_path / "config.yaml").read_text())["environment"]
    assert load_config(tmp_path / "config.yaml") == tiny_config
