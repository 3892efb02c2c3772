"""Settings from a YAML file and from flags: a file sets a run and a flag overrides it.

What is wrong is told in one message before anything is imported that is slow: an unknown name with the nearest one that
there is, a value of another type, a file that cannot be read.
"""

import argparse
import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from hyvideo.config.sections import RewardSettings
from hyvideo.config.settings import FIELDS, SECTIONS, TRAITS, Config, is_json
from hyvideo.data.outside import BriefErrors, file_problem, parse_json, shown

MAX_BYTES = 2**20  # of a YAML file
TRUTHS = dict.fromkeys(("true", "yes", "on", "1", "t", "y"), True) | dict.fromkeys(
    ("false", "no", "off", "0", "f", "n"), False
)
# Settings of earlier versions that old files may have, and why nothing is lost without them.
REMOVED = {"spool_rounds": "a restart draws the rollouts of an unfinished iteration again, bit for bit"}


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """The settings that were asked for, and whether to print them and stop."""

    config: Config
    print_config: bool


def parse(argv: list[str] | None = None) -> CommandLine:
    """Settings from ``--config file.yaml`` and flags, which win.

    Ends the program with code 2 and one message for an unknown name, a value of the wrong type or an unreadable file.
    """
    parser = _parser()
    options, strangers = parser.parse_known_args([*map(_as_flag, sys.argv[1:] if argv is None else argv)])
    if strangers:
        flags = [f"--{name}" for name in FIELDS]
        parser.error(f"unknown flag {strangers[0][:200]}; {nearest(strangers[0], flags) or '--help lists them'}")
    given = vars(options)
    path, print_config = given.pop("config"), given.pop("print_config")
    try:
        asked = Config().with_settings(**_without_removed((read_settings(path) if path else {}) | given))
    except ValueError as error:
        parser.error(f"--config {error}")
    config = asked.resolved()
    if asked.rollout.eta != config.rollout.eta and "eta" in given:
        parser.error(
            f"--eta {asked.rollout.eta:g} contradicts match_noise {config.rollout.match_noise}, which chooses eta "
            f"{config.rollout.eta:.4g}; give one of them, or --match_noise= to match nothing"
        )
    return CommandLine(config, print_config)


def load_config(path: str | Path, **overrides) -> Config:
    """The settings of a YAML file, with some of them changed. Raises ValueError for a file with a mistake."""
    return Config().with_settings(**_without_removed(read_settings(path)) | overrides).resolved()


def _without_removed(values: dict[str, Any]) -> dict[str, Any]:
    """Settings that there are; says on stderr what the others did."""
    for name in values.keys() & REMOVED.keys():
        print(f"the setting {name} does nothing any more: {REMOVED[name]}", file=sys.stderr)
    return {name: value for name, value in values.items() if name not in REMOVED}


# --- flags ------------------------------------------------------------------------------------------------------------


class _Parser(BriefErrors, argparse.ArgumentParser):
    pass


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        usage="%(prog)s --config FILE.yaml [--setting value ...]",
        description="Post-trains a video flow model by SAGE-GRPO. --config FILE.yaml sets a run, flags override it; "
        "--print_config shows the resolved settings and the arithmetic of the run.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=36, width=120),
    )
    parser.add_argument("--config", default=None, metavar="FILE.yaml", help="settings of a run")
    parser.add_argument("--print_config", action="store_true", default=False, help="show what would be run, and stop")
    for name in REMOVED:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    defaults = Config().flat()
    for section, cls in SECTIONS.items():
        group = parser.add_argument_group(f"{section}: {cls.__doc__.rstrip('.')}")
        for field in dataclasses.fields(cls):
            group.add_argument(f"--{field.name}", **_flag_options(field.name, field.type, defaults[field.name]))
    return parser


def _flag_options(name: str, kind: Any, default: Any) -> dict[str, Any]:
    """Arguments for argparse to read a setting, with its help."""
    words = str(default).lower() if kind is bool else " ".join(default) if isinstance(default, list) else default
    sentence = TRAITS[name].sentence + ("" if words in (None, "") else f" ({words})")
    options = {"type": partial(_value, name), "help": sentence.replace("%", "%%")}
    if kind is bool:
        return options | {"nargs": "?", "const": True, "metavar": "BOOL"}
    if get_origin(kind) is list:
        return options | {"nargs": "+", "metavar": "NAME"}
    if get_origin(kind) is Literal:
        return options | {"metavar": "|".join(get_args(kind))}
    return options | {"metavar": {str: "TEXT", int: "INT"}.get(kind, "NUMBER")}


def _as_flag(word: str) -> str:
    """``--learning-rate=1e-5`` as ``--learning_rate=1e-5``, and ``--no_use_muon`` as ``--use_muon=false``."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    name = flag[2:].replace("-", "_")
    if name.removeprefix("no_") in FIELDS and name not in FIELDS and FIELDS[name[3:]].type is bool and not equals:
        return f"--{name[3:]}=false"
    return f"--{name}{equals}{value}"


def _value(name: str, text: str) -> Any:
    """A setting's value, or one of its list. Raises argparse.ArgumentTypeError for text that says none."""
    kind = FIELDS[name].type
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            choices = get_args(kind)
            hint = nearest(text, choices)
            raise argparse.ArgumentTypeError(
                f"invalid choice: {shown(text)} (choose from {', '.join(choices)}){hint and '; ' + hint}"
            )
        return text
    if kind is bool:
        if text.lower() not in TRUTHS:
            raise argparse.ArgumentTypeError(f"invalid truth value: {shown(text)} (true or false)")
        return TRUTHS[text.lower()]
    number = int if kind is int else float if float in (kind, *get_args(kind)) else str
    try:
        return number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid {number.__name__} value: {shown(text)}") from error


def nearest(word: str, names: Iterable[str]) -> str:
    """A question after the name that is most like a word, empty where none is like it."""
    near = difflib.get_close_matches(word[:100].partition("=")[0], names, n=1)
    return f"did you mean {near[0]}?" if near else ""


# --- files ------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """The safe loader with decimal numbers, ``1e-5`` among them, and dates as text; refuses a name given twice."""

    yaml_implicit_resolvers: dict = {}

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in names[:number]:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} gives {shown(key.value, 80)} a second time")
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"(?i:true|false|yes|no|on|off)", list("tTfFyYnNoO")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_pattern})$"), _first)
# What the loader raises for text that is no YAML, for a tag that its value does not fit, and for depth without end.
_NO_YAML = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


def read_yaml(path: str | Path) -> object:
    """The content of a YAML file. Raises ValueError for a file that cannot be read, and for what is no YAML."""
    if problem := file_problem(path, MAX_BYTES):
        raise ValueError(f"must name a readable YAML file, got {shown(path)}: {problem}")
    try:
        return _Loader(Path(path).read_text(encoding="utf-8-sig")).get_single_data()
    except OSError as error:
        raise ValueError(f"must name a readable YAML file, got {shown(path)}: {error.strerror}") from error
    except _NO_YAML as error:
        raise ValueError(f"{shown(path)} is not valid YAML: {' '.join(str(error).split())[:500]}") from error


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings of a file, by name. Raises ValueError for a name that is none and for a value of another type."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold `name: value` lines, got {type(content).__name__}")
    content.pop("environment", None)  # of the config.yaml that a run leaves
    values = {}
    for name, value in content.items():
        if name in REMOVED:
            values[name] = value
            continue
        if name not in FIELDS:
            hint = nearest(str(name), FIELDS) or "--help lists the settings"
            raise ValueError(f"{path}: unknown setting {shown(name, 80)}; {hint}")
        try:
            values[name] = _value_of_yaml(name, value)
        except (TypeError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"{path}: setting {name!r} {error}") from error
    return values


def _value_of_yaml(name: str, value: object) -> Any:
    """A setting's value. Raises TypeError where YAML's type cannot be the setting's, though its text may look so."""
    kind = FIELDS[name].type
    if get_origin(kind) is list:
        words = value if isinstance(value, list) else [value]
        if strangers := [word for word in words if not isinstance(word, str)]:
            raise TypeError(f"takes a list of words, got {shown(strangers[0], 80)} in it; put it in quotes")
        return words
    if isinstance(value, dict) and name in ("reward_weights", "reward_config"):
        return json.dumps(value)
    if not isinstance(value, (str, bool, int, float)):
        got = {list: "a list", dict: "a mapping", type(None): "nothing"}.get(type(value), type(value).__name__)
        raise TypeError(f"takes one value, got {got}; leave it out for its default")
    if isinstance(value, bool) and kind is not bool:
        word = str(value).lower()
        raise TypeError(
            f"got the truth value {word}, as YAML reads yes, no, on, off, true and false; put text in quotes"
        )
    if isinstance(value, float) and kind is int:
        raise TypeError(f"takes a whole number, got {value:g}; write its digits")
    return _value(name, str(value))


def reward_options(reward: RewardSettings) -> dict[str, dict]:
    """Options of each scorer, of the settings and of ``reward_config``, which wins. Raises ValueError for that one."""
    options: dict[str, dict] = {name: {} for name in reward.reward_model}
    if "videoalign" in options:
        options["videoalign"] = {"mode": reward.reward_checkpoint_mode, "precision": reward.reward_precision}
    if not reward.reward_config:
        return options
    path = reward.reward_config
    try:
        content = parse_json(path) if is_json(path) else read_yaml(path)
    except ValueError as error:
        raise ValueError(f"reward_config {error}{f', got {path}' if is_json(path) else ''}") from error
    for name, given in (content if isinstance(content, dict) else {"": None}).items():
        if name not in options or not isinstance(given, dict):
            raise ValueError(
                f"reward_config {path} must hold a mapping of options for {', '.join(options)}, got {shown(name)}"
            )
        if of_the_run := sorted(given.keys() & {"name", "root", "device"}):
            raise ValueError(f"reward_config {path} has {', '.join(of_the_run)} for {name}, which the run decides")
        options[name] = options[name] | given
    return options
