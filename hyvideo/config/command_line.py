"""Settings from a YAML file and from flags, which override the file. Mistakes end in one message."""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from hyvideo.config import processes
from hyvideo.config.reference_flags import TASK, Row, add_flags, flags_in, meanings, print_ignored, table
from hyvideo.config.sections import RewardSettings
from hyvideo.config.setting import TRUTHS, Switch
from hyvideo.config.settings import FIELDS, SECTIONS, TRAITS, Config, in_form, is_json, value_type
from hyvideo.data.outside import ROOT, Parser, file_problem, nearest, parse_json, quote
from hyvideo.models.versions import version_defaults

MAX_BYTES = 2**20  # largest YAML file
REFERENCE_SCORERS = {"videoalign_local": "videoalign"}  # names of scorers in the public reference


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """Settings of a command line, the flags that set them, and whether to print them only or to try them."""

    config: Config
    print_config: bool
    pilot: bool  # the settings are those of a pilot
    world_size: int  # processes
    flags: Mapping[str, str]  # flag by setting; also the settings of a file that is not among the project's configs


def parse(argv: list[str] | None = None, saved: Mapping[str, Any] | None = None) -> CommandLine:
    """Return the settings of ``--config file.yaml``, or of a ``saved`` run, overridden by flags. Exits on mistakes."""
    words = sys.argv[1:] if argv is None else argv
    parser = _parser()
    renamed = add_flags(parser, words, table("post_train"))
    options, unknown = parser.parse_known_args(words)
    if unknown:
        word, names = unknown[0][:200], [f"--{name}" for name in [*FIELDS, *table("post_train")] if "*" not in name]
        flag = dict(zip(words[1:], words)).get(unknown[0], "")
        is_value = re.match("-[^-]", word) and flag.startswith("--")
        hint = f"if it is a value, write {flag}={word}" if is_value else nearest(word, names)
        parser.error(f"unknown flag {word}; {hint or '--help lists them'}")
    given = vars(options)
    path, print_config, pilot, world_size = map(given.pop, ("config", "print_config", "pilot", "world_size"))
    if world_size is not None and not (print_config and world_size > 0):
        parser.error(
            f"--world_size must be positive and needs --print_config, got {world_size}; torchrun sets it for a run"
        )
    try:
        inherited = dict(saved or {}) if path is None else read_settings(path)
    except ValueError as error:
        parser.error(f"--config {error}")
    try:
        words_by_flag = {name: given.pop(name) for name in renamed if name in given}
        values, flags = _translated(given, words_by_flag, inherited)
        requested = Config().with_settings(**_resolve_reference_names(inherited | values))
    except ValueError as error:
        parser.error(str(error))
    config = requested.resolved()
    if requested.rollout.eta != config.rollout.eta and "eta" in given:
        parser.error(
            f"--eta {requested.rollout.eta:g} contradicts match_noise {config.rollout.match_noise}, which sets eta to "
            f"{config.rollout.eta:.4g}; remove --eta, or disable noise matching with --match_noise="
        )
    config = config.as_pilot() if pilot else config
    if path is not None and not Path(path).resolve().is_relative_to(ROOT / "configs"):
        flags = {name: name for name in inherited} | flags
    return CommandLine(config, print_config, pilot, world_size or processes.world_size(), flags)


def load_config(path: str | Path, **overrides) -> Config:
    """Return the settings of a YAML file with overrides. Raises ValueError for an invalid file."""
    return Config().with_settings(**_resolve_reference_names(read_settings(path) | overrides)).resolved()


def _translated(given: dict, by_flag: dict[str, list[str]], inherited: dict) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of flags or of a file, and the name that gave each. ValueError for contradicting names."""
    values, names = dict(given), {name: name for name in given}
    found = meanings(by_flag, table("post_train"), inherited | given)
    for setting, flag, words, row in sorted(found, key=lambda meaning: meaning.row.unless_set):
        value = words[0] if setting == TASK else _value_of_words(setting, flag, words)
        if row.unless_set and value and (values.get(setting) or inherited.get(setting)):
            continue
        if setting in values and in_form(setting, values[setting]) != value:
            texts = (" ".join(v) if isinstance(v, list) else v for v in (in_form(setting, values[setting]), value))
            both = f"{names[setting]} and {flag} set {setting} to {' and '.join(map(quote, texts))}"
            why = row.conflict or ("they are two names of one setting" if row.sets else "they contradict each other")
            raise ValueError(f"{both}; {why}: remove one of them")
        values[setting], names[setting] = value, flag
    return values, names


def _value_of_words(name: str, flag: str, words: list[str]) -> Any:
    try:
        if get_origin(value_type(name)) is list:
            return in_form(name, [value_of(name, word) for word in words])
        if len(words) != 1:
            raise argparse.ArgumentTypeError(f"takes one value, got {quote(' '.join(words))}")
        return value_of(name, words[0])
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{flag} {error}") from error


def _resolve_reference_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the reference's task and scorer names. Raises ValueError if one is wrong or ambiguous."""
    version = values.get("transformer_version", Config().model.transformer_version)
    task, known = values.pop(TASK, None), version_defaults(version)
    expected = known.task or task
    if task not in (None, expected):
        raise ValueError(f"task_type must be {expected} for transformer_version {version}, got {task}; change one")
    if "reward_model" in values:
        scorers = in_form("reward_model", values["reward_model"])
        values["reward_model"] = [REFERENCE_SCORERS.get(name, name) for name in scorers]
    if task:
        print_ignored({table("post_train")["task_type"].no_effect: [f"task_type {task}"]})
    return values


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "Post-train a video flow-matching model with SAGE-GRPO. Flags override the settings of --config FILE.yaml.\n"
        "Flags of the public reference that have another name here are accepted: see docs/reference_flags.md.",
        usage="%(prog)s --config FILE.yaml [--setting value ...]",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", default=None, metavar="FILE.yaml", help="YAML file of settings")
    parser.add_argument("--print_config", action="store_true", default=False, help="print settings and plan, then exit")
    parser.add_argument(
        "--pilot", action="store_true", default=False, help="run two iterations and compare them with the plan"
    )
    parser.add_argument("--world_size", type=int, default=None, metavar="INT", help="processes to plan for")
    defaults = Config().flat()
    for section, cls in SECTIONS.items():
        group = parser.add_argument_group(f"{section}: {cls.__doc__.rstrip('.')}")
        for field in dataclasses.fields(cls):
            group.add_argument(f"--{field.name}", **flag_options(field.name, defaults[field.name]))
    return parser


def flag_options(name: str, default: Any = None, sentence: str = "") -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a setting; ``sentence`` replaces its help."""
    kind = value_type(name)
    words = str(default).lower() if kind is bool else " ".join(default) if isinstance(default, list) else default
    sentence = (sentence or TRAITS[name].sentence) + ("" if words in (None, "") else f" (default: {words})")
    options = {"type": partial(value_of, name), "help": sentence.replace("%", "%%")}
    if kind in (bool, Switch):
        return options | {"nargs": "?", "const": in_form(name, True), "metavar": "BOOL"}
    if get_origin(kind) is list:
        return options | {"nargs": "+", "metavar": "NAME"}
    if get_origin(kind) is Literal:
        return options | {"metavar": "|".join(get_args(kind))}
    if TRAITS[name].choices:
        return options | {"metavar": "|".join([*TRAITS[name].choices, "FILE.py:NAME"])}
    return options | {"metavar": {str: "TEXT", int: "INT", float: "NUMBER"}[kind]}


def value_of(name: str, text: str) -> Any:
    """Return the value of a setting, or an element of its list. Raises argparse.ArgumentTypeError for invalid text."""
    kind = value_type(name)
    if kind is Switch and text.lower() in TRUTHS:
        return in_form(name, TRUTHS[text.lower()])
    if choices := get_args(kind) if get_origin(kind) is Literal else TRAITS[name].choices:
        if text in choices or (kind is str and ".py:" in text):
            return text
        hint = nearest(text, choices)
        others = " or FILE.py:NAME" if kind is str else ""
        message = f"invalid choice: {quote(text)} (choose from {', '.join(choices)}{others})"
        raise argparse.ArgumentTypeError(f"{message}; {hint}" if hint else message)
    if kind is bool:
        return truth(text)
    number = int if kind is int else float if kind is float else str
    try:
        return number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid {number.__name__} value: {quote(text)}") from error


def truth(text: str) -> bool:
    """Return the truth value of ``true``, ``off`` etc. Raises argparse.ArgumentTypeError for other text."""
    if text.lower() not in TRUTHS:
        raise argparse.ArgumentTypeError(f"invalid bool value: {quote(text)} (choose from true, false)")
    return TRUTHS[text.lower()]


class _Loader(yaml.SafeLoader):
    """Safe loader with decimal numbers, including ``1e-5``, and dates as text; rejects duplicate names and aliases."""

    yaml_implicit_resolvers: dict = {}

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):  # aliases of aliases make a short file expand without bound
            event = self.peek_event()
            raise yaml.YAMLError(f"line {event.start_mark.line + 1}: replace the alias *{event.anchor} by its value")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in names[:number]:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} repeats {quote(key.value, 80)}")
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"(?i:true|false|yes|no|on|off)", list("tTfFyYnNoO")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_pattern})$"), _first)
# Errors of the loader for invalid YAML, a tag that does not fit its value, and too deep nesting.
_YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


def renamed_configs() -> dict[str, str]:
    """Return the configs that replace those of earlier versions, by the earlier name."""
    return yaml.safe_load(Path(__file__).with_name("renamed_configs.yaml").read_text(encoding="utf-8"))


def read_yaml(path: str | Path) -> object:
    """Return the content of a YAML file. Raises ValueError for an unreadable file or invalid YAML."""
    if problem := file_problem(path, MAX_BYTES):
        new_names = [new for old, new in renamed_configs().items() if Path(path).resolve() == ROOT / old]
        hint = f"; it is now {new_names[0]}" if new_names else ""
        raise ValueError(f"{quote(path)} must be a readable YAML file: {problem}{hint}")
    try:
        return _Loader(Path(path).read_text(encoding="utf-8-sig")).get_single_data()
    except OSError as error:
        raise ValueError(f"{quote(path)} must be a readable YAML file: {error.strerror}") from error
    except _YAML_ERRORS as error:
        raise ValueError(f"{quote(path)} is not valid YAML: {' '.join(str(error).split())[:500]}") from error


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return the settings of a file, by name. Raises ValueError for an unknown name or a value of the wrong type."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain `name: value` lines, got {type(content).__name__}")
    content.pop("environment", None)  # written to config.yaml by a run
    values, words_by_flag = {}, {}
    for name, value in content.items():
        row = flags_in([str(name)], table("post_train")).get(name)
        if not row and name not in FIELDS:
            hint = nearest(str(name), FIELDS) or "--help lists the settings"
            raise ValueError(f"{path}: unknown setting {quote(name, 80)}; {hint}")
        try:
            if row:
                words_by_flag[name] = _words_of_yaml(row, value)
            else:
                values[name] = _value_of_yaml(name, value)
        except (TypeError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"{path}: setting {name!r} {error}") from error
    try:
        return _translated(values, words_by_flag, {})[0]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _words_of_yaml(row: Row, value: object) -> list[str]:
    """Return the words of a reference flag. Raises TypeError for a value of the wrong type."""
    value = "none" if value is None and ("none" in row.values or not row.sets) else value
    if len(row.sets) == 1:
        _value_of_yaml(row.sets[0], value)
    return [str(word) for word in (value if isinstance(value, list) else [value])] or [""]


def _value_of_yaml(name: str, value: object) -> Any:
    """Return the value of a setting. Raises TypeError for a YAML value of the wrong type."""
    kind = value_type(name)
    if get_origin(kind) is list:
        words = value if isinstance(value, list) else [value]
        if others := [word for word in words if not isinstance(word, str)]:
            raise TypeError(f"must be a list of strings, got the element {quote(others[0], 80)}; put it in quotes")
        return words
    if isinstance(value, dict) and name in ("reward_weights", "reward_config"):
        return json.dumps(value)
    if not isinstance(value, (str, bool, int, float)):
        got = {list: "a list", dict: "a mapping", type(None): "nothing"}.get(type(value), type(value).__name__)
        raise TypeError(f"must be a single value, got {got}; remove the line to use the default")
    if isinstance(value, bool) and kind not in (bool, Switch):
        word = str(value).lower()
        raise TypeError(f"must not be a bool, got {word} (YAML reads yes, no, on and off as bools); put text in quotes")
    if isinstance(value, float) and kind is int:
        raise TypeError(f"must be an integer, got {value:g}; write it without a point or exponent")
    return value_of(name, str(value))


def reward_options(reward: RewardSettings) -> dict[str, dict]:
    """Return the options of each scorer; ``reward_config`` overrides settings. Raises ValueError if it is invalid."""
    options: dict[str, dict] = {name: {} for name in [*reward.reward_model, *reward.held_out_reward_model]}
    if "videoalign" in options:
        options["videoalign"] = {"precision": reward.reward_precision}
    if not reward.reward_config:
        return options
    path = reward.reward_config
    try:
        content = parse_json(path) if is_json(path) else read_yaml(path)
    except ValueError as error:
        raise ValueError(f"reward_config {error}{f', got {path}' if is_json(path) else ''}") from error
    for key, given in (content if isinstance(content, dict) else {"": None}).items():
        name = REFERENCE_SCORERS.get(key, key)
        if name not in options or not isinstance(given, dict):
            raise ValueError(
                f"reward_config {path} must map {', '.join(options)} to a mapping of options, got {quote(key)}"
            )
        if reserved := sorted(given.keys() & {"name", "root", "device"}):
            raise ValueError(f"reward_config {path} must not set {', '.join(reserved)} of {name}; remove it")
        options[name] = options[name] | given
    return options


def options_of_scorer(name: str, config: str) -> dict:
    """Return the options of a scorer in a ``reward_config`` or, as before, in JSON without its name."""
    if is_json(config) and f"{json.dumps(name)}:" not in config.replace('" :', '":'):
        config = f"{{{json.dumps(name)}: {config}}}"
    return reward_options(RewardSettings(reward_model=[name], reward_config=config))[name]
