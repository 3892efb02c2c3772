"""The --help texts of programs describe the program itself."""

import pytest

import generate
from examples import gradient_norms


def help_of(program, capsys):
    with pytest.raises(SystemExit) as ended:
        program(["--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_help_of_gradient_norms_says_what_it_measures(capsys):
    text = help_of(gradient_norms.main, capsys)
    assert "Measure the policy's gradient norm" in text and "Post-train" not in text
    assert "``" not in text and "Accepts the flags of post_train.py" in text


def test_the_help_of_generate_does_not_name_settings_of_training(capsys):
    text = help_of(generate.parse, capsys)
    assert "--video_length INT Frames; default: the version's" in text
    names = (
        "validation_steps:",
        "sample_n_frames:",
        "sde_type:",
        "cfg_scale:",
        "Negative prompt of rollouts",
        "``",
    )
    assert not [name for name in names if name in text]
