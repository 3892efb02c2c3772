"""The --help texts of programs describe the program itself, and name each default once."""

import argparse
import importlib
import re
import sys

import pytest

import generate
from examples import gradient_norms
from tests.forked import ROOT

NO_PARSER = {"scripts.launch"}  # with the flags of torchrun
PROGRAMS = [
    "generate",
    "post_train",
    *(
        f"{path.parent.name}.{path.stem}"
        for folder in ("scripts", "examples")
        for path in sorted((ROOT / folder).glob("*.py"))
        if "def main(" in path.read_text(encoding="utf-8")
    ),
]


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
    assert "--video_length INT Frames; default: the value of the run" in text
    names = (
        "validation_steps:",
        "sample_n_frames:",
        "sde_type:",
        "cfg_scale:",
        "Negative prompt of rollouts",
        "``",
    )
    assert not [name for name in names if name in text]


class Found(Exception):
    """Raised with the parser of a program, to stop the program."""


def parsers_of(name, monkeypatch):
    """Yield the parser of a program, and the parsers of its subcommands."""

    def found(parser, *args, **options):
        raise Found(parser)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    module = importlib.import_module(name)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", found)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", found)
    with pytest.raises(Found) as stopped:
        module.main()
    waiting = [stopped.value.args[0]]
    while waiting:
        parser = waiting.pop()
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()


def faults(parser):
    """Return the flags whose help is missing, or does not name the default exactly once."""
    formatter = parser.formatter_class(prog="")
    found = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        text = formatter._get_help_string(action) if action.help else ""
        has_default = action.default not in (None, False, "", [], argparse.SUPPRESS)
        count = len(re.findall(r"[(;] ?default\b", text))
        if not text or "``" in text or count > 1 or (has_default and count == 0):
            found.append(f"{action.option_strings or action.dest}: {text}")
    return found


@pytest.mark.parametrize("name", sorted({*PROGRAMS} - NO_PARSER))
def test_the_help_of_every_flag_names_its_default_once(name, monkeypatch):
    for parser in parsers_of(name, monkeypatch):
        assert not faults(parser)
        assert "``" not in (parser.description or "") + (parser.epilog or "")
