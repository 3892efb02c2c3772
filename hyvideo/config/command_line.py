"""Settings from a YAML file and from flags, which override the file.

Mistakes end in one message.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hyvideo.config import processes
from hyvideo.config.all_settings import RewardSettings
from hyvideo.config.config import FIELDS, SECTIONS, TRAITS, Config, in_form, is_json, value_type
from hyvideo.config.declaration import Switch
from hyvideo.config.reference_flags import (
    REFERENCE_SCORERS,
    add_flags,
    flags_in,
    print_ignored_switches,
    resolve_reference_names,
    table,
    translate,
    without_flags_strategy,
    without_flags_words,
    words_of_yaml,
)
from hyvideo.config.values import value_of, value_of_yaml
from hyvideo.data.cli import Parser
from hyvideo.data.files import ROOT, parse_json
from hyvideo.data.text import nearest, quote
from hyvideo.data.yaml_file import read_yaml
from hyvideo.models.registry import register

MAX_WORLD_SIZE = 100_000  # more processes take minutes to plan


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """Settings of a command line, the flags that set them, and whether to print them only or to try
    them.
    """

    config: Config
    print_config: bool
    pilot: bool  # the settings describe a pilot
    world_size: int  # processes
    # flag by setting; also the settings of a file that is not among the project's configs
    flags: Mapping[str, str]
    of_version: list[str]  # settings that were not given and have the value of the model version


def parse(argv: list[str] | None = None, saved: Mapping[str, Any] | None = None) -> CommandLine:
    """Return the settings of ``--config file.yaml``, or of a ``saved`` run, overridden by flags.

    Exits on mistakes.
    """
    words = without_flags_words(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    renamed = add_flags(parser, words, table("post_train"))
    options, unknown = parser.parse_known_args(words)
    if unknown:
        word, names = (
            unknown[0][:200],
            [f"--{name}" for name in [*FIELDS, *table("post_train")] if "*" not in name],
        )
        flag = dict(zip(words[1:], words)).get(unknown[0], "")
        is_value = re.match("-[^-]", word) and flag.startswith("--")
        hint = f"if it is a value, write {flag}={word}" if is_value else nearest(word, names)
        parser.error(f"unknown flag {word}; {hint or '--help lists them'}")
    given = vars(options)
    path, print_config, pilot, world_size = map(
        given.pop, ("config", "print_config", "pilot", "world_size")
    )
    if world_size is not None and not (print_config and 0 < world_size <= MAX_WORLD_SIZE):
        parser.error(
            f"--world_size must be positive and needs --print_config, got {world_size}; it is at "
            f"most {MAX_WORLD_SIZE:,}, and torchrun sets it for a run"
        )
    try:
        inherited = dict(saved or {}) if path is None else read_settings(path)
    except ValueError as error:
        parser.error(f"--config {error}")
    try:
        words_by_flag = {name: given.pop(name) for name in renamed if name in given}
        values, flags = translate(given, words_by_flag, inherited)
        if "kl_strategy" in given:
            print_ignored_switches(words_by_flag)
        requested = Config().with_settings(**resolve_reference_names(inherited | values))
        register(requested.model.family)
    except ValueError as error:
        parser.error(str(error))
    config = requested.resolved()
    if requested.rollout.eta != config.rollout.eta and "eta" in given:
        parser.error(
            f"--eta {requested.rollout.eta:g} contradicts match_noise "
            f"{config.rollout.match_noise}, which sets eta to {config.rollout.eta:.4g}; remove "
            "--eta, or disable noise matching with --match_noise="
        )
    config = config.as_pilot() if pilot else config
    if path is not None and not Path(path).resolve().is_relative_to(ROOT / "configs"):
        flags = {name: name for name in inherited} | flags
    return CommandLine(
        config=config,
        print_config=print_config,
        pilot=pilot,
        world_size=world_size or processes.world_size(),
        flags=flags,
        of_version=list(requested.defaults_of_version),
    )


def load_config(path: str | Path, **overrides) -> Config:
    """Return the settings of a YAML file with overrides. Raises ValueError for an invalid file."""
    settings = resolve_reference_names(read_settings(path) | overrides)
    register(settings.get("family", ""))
    return Config().with_settings(**settings).resolved()


def config_of_run(path: str | Path) -> Config:
    """Return the settings in the config.yaml of a run. Raises ValueError for an invalid file.

    The file has the values that the run used, so a family outside the repository, which may have
    been moved since, is not needed.
    """
    return Config().with_settings(**resolve_reference_names(read_settings(path))).resolved()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "Post-train a video flow-matching model with SAGE-GRPO. Flags override the settings of "
        "--config FILE.yaml.\n"
        "Flags of the public reference that have another name here are accepted: see "
        "docs/reference_flags.md.",
        usage="%(prog)s --config FILE.yaml [--setting value ...]",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", default=None, metavar="FILE.yaml", help="YAML file of settings")
    parser.add_argument(
        "--print_config",
        action="store_true",
        default=False,
        help="print settings and plan, then exit",
    )
    parser.add_argument(
        "--pilot",
        action="store_true",
        default=False,
        help="run two iterations and compare them with the plan",
    )
    parser.add_argument(
        "--world_size", type=int, default=None, metavar="INT", help="processes to plan for"
    )
    defaults = Config().flat()
    for section, cls in SECTIONS.items():
        group = parser.add_argument_group(f"{section}: {cls.__doc__.rstrip('.')}")
        for field in dataclasses.fields(cls):
            group.add_argument(f"--{field.name}", **flag_options(field.name, defaults[field.name]))
    return parser


def flag_options(name: str, default: Any = None, sentence: str = "") -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a setting; ``sentence`` replaces its help."""
    kind = value_type(name)
    words = (
        str(default).lower()
        if kind is bool
        else " ".join(default)
        if isinstance(default, list)
        else default
    )
    sentence = (sentence or TRAITS[name].sentence) + (
        "" if words in (None, "") else f" (default: {words})"
    )
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


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return the settings of a file, by name.

    Raises ValueError for an unknown name or a value of the wrong type.
    """
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain `name: value` lines, got {type(content).__name__}")
    content.pop("environment", None)  # written to config.yaml by a run
    content = without_flags_strategy(content)
    values, words_by_flag = {}, {}
    for name, value in content.items():
        row = flags_in([str(name)], table("post_train")).get(name)
        if not row and name not in FIELDS:
            hint = nearest(str(name), FIELDS) or "--help lists the settings"
            raise ValueError(f"{path}: unknown setting {quote(name, 80)}; {hint}")
        try:
            if row:
                words_by_flag[name] = words_of_yaml(row, value)
            else:
                values[name] = value_of_yaml(name, value)
        except (TypeError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"{path}: setting {name!r} {error}") from error
    try:
        return translate(values, words_by_flag, {})[0]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def reward_options(reward: RewardSettings) -> dict[str, dict]:
    """Return the options of each scorer; ``reward_config`` overrides settings.

    Raises ValueError if it is invalid.
    """
    options: dict[str, dict] = {
        name: {} for name in [*reward.reward_model, *reward.held_out_reward_model]
    }
    if "videoalign" in options:
        options["videoalign"] = {"precision": reward.reward_precision}
    if not reward.reward_config:
        return options
    path = reward.reward_config
    try:
        content = parse_json(path) if is_json(path) else read_yaml(path)
    except ValueError as error:
        raise ValueError(
            f"reward_config {error}{f', got {path}' if is_json(path) else ''}"
        ) from error
    for key, given in (content if isinstance(content, dict) else {"": None}).items():
        name = REFERENCE_SCORERS.get(key, key)
        if name not in options or not isinstance(given, dict):
            raise ValueError(
                f"reward_config {path} must map {', '.join(options)} to a mapping of options, got "
                f"{quote(key)}"
            )
        if reserved := sorted(given.keys() & {"name", "root", "device"}):
            raise ValueError(
                f"reward_config {path} must not set {', '.join(reserved)} of {name}; remove it"
            )
        options[name] = options[name] | given
    return options


def options_of_scorer(name: str, config: str) -> dict:
    """Return the options of a scorer in a ``reward_config`` or, as before, in JSON without its
    name.
    """
    if is_json(config) and f"{json.dumps(name)}:" not in config.replace('" :', '":'):
        config = f"{{{json.dumps(name)}: {config}}}"
    return reward_options(RewardSettings(reward_model=[name], reward_config=config))[name]
