"""Settings from a YAML file and from flags, which override the file.

Mistakes end in one message.
"""

import argparse
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hyvideo.files.cli import Parser
from hyvideo.files.files import ROOT
from hyvideo.files.yaml_files import read_yaml
from hyvideo.models.registry import register
from hyvideo.settings import processes
from hyvideo.settings.config import (
    LEAVES,
    OBJECTIVE,
    SECTIONS,
    Config,
    objectives_with,
    without_custom_objective,
)
from hyvideo.settings.objectives import BUILT_IN, ObjectiveSettings, settings_class
from hyvideo.settings.reference_flags import RENAMED, add_flags, translate, with_flags
from hyvideo.settings.sections import Leaf, NoiseScale, Switch, leaves_of

# Flags of another machine to plan for, with which the plan is printed as with --print_config.
MACHINE = {
    "world_size": (int, "processes to plan for"),
    "gpu": (str, "GPU to plan for, such as RTX 4090"),
    "gpu_memory": (float, "memory of a GPU in GiB"),
}
USAGE = "%(prog)s --config FILE.yaml [--setting value ...]"
NO_SETTINGS = ("config", "pilot", "print_config", *MACHINE)  # flags of the program
ENVIRONMENT = "environment"  # entry of config.yaml that is no setting


@dataclass(frozen=True)
class CommandLine:
    """Settings of a command line, the flags that set them, and what to do with them."""

    config: Config
    file: str  # YAML file of the settings; empty without one
    print_config: bool
    pilot: bool  # the settings describe a pilot
    # of another machine, for the plan of --print_config
    world_size: int | None
    gpu: str | None
    gpu_memory: float | None
    words: list[str]  # without the flags of the plan
    # flag by setting; also the settings of a file that is not among the project's configs
    flags: Mapping[str, str]
    of_version: list[str]  # settings that were not given and have the value of the model version


def parse(
    argv: list[str] | None = None,
    saved: Mapping[str, Any] | None = None,
    *,
    others: Sequence[str] = (),
) -> CommandLine:
    """Return the settings of ``--config file.yaml``, or of a ``saved`` run, overridden by flags.

    ``others`` are flags that the program has read before. Exits on mistakes.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    machine, words_of_run = _machine_parser().parse_known_args(words)
    chosen, _ = _choice_parser().parse_known_args(words)
    parser = _machine_parser()
    try:
        inherited = dict(saved or {}) if chosen.config is None else read_settings(chosen.config)
        parser = _parser(chosen.objective or inherited.get(OBJECTIVE), words)
        parser.others = others
        given = vars(parser.parse_args(words))
        is_pilot = given["pilot"]
        given = {name: value for name, value in given.items() if name not in NO_SETTINGS}
        inherited = _of_objective(inherited, chosen.objective)
        requested, flags = _request(given, inherited)
        config = requested.resolved()
        _check_replaced(given, config)
    except ValueError as error:
        parser.error(str(error))
    file = chosen.config or ""
    if file and not Path(file).resolve().is_relative_to(ROOT / "configs"):
        flags = {name: name for name in inherited} | flags
    return CommandLine(
        config=config.as_pilot() if is_pilot else config,
        file=file,
        print_config=machine.print_config or any(getattr(machine, name) for name in MACHINE),
        pilot=is_pilot,
        world_size=machine.world_size,
        gpu=machine.gpu,
        gpu_memory=machine.gpu_memory,
        words=words_of_run,
        flags=flags,
        of_version=list(requested.defaults_of_version),
    )


def _request(
    given: Mapping[str, Any], inherited: Mapping[str, Any]
) -> tuple[Config, dict[str, str]]:
    """Return the settings as they are requested, and the flag that gave each.

    Raises ValueError, which names the flags.
    """
    values, flags = translate(given, inherited)
    merged = {**inherited, **values}
    register(str(merged.get("family", "")))
    try:
        return Config.from_flat(merged), flags
    except ValueError as error:
        raise ValueError(with_flags(str(error), flags)) from error


def _check_replaced(given: Mapping[str, Any], config: Config) -> None:
    """Raise ValueError for a flag whose value the other settings replace."""
    strategy = given.get("kl_strategy", "none")
    if strategy != "none" and config.objective.strategy == "none" and "kl_weight" not in given:
        raise ValueError(
            f"--kl_strategy {strategy} needs a kl_weight above 0, got 0 from the file; add "
            "--kl_weight"
        )


def load_config(path: str | Path, **overrides: Any) -> Config:
    """Return the settings of a YAML file with overrides. Raises ValueError for an invalid file."""
    inherited = _of_objective(read_settings(path), overrides.get(OBJECTIVE))
    settings = inherited | overrides
    register(str(settings.get("family", "")))
    return _config(path, settings)


def config_of_run(path: str | Path) -> Config:
    """Return the settings in the config.yaml of a run. Raises ValueError for an invalid file.

    The file has the values that the run used, so that a family or an objective outside the
    repository, which may have been moved since, is not needed.
    """
    return _config(path, without_custom_objective(read_settings(path)))


def _config(path: str | Path, settings: Mapping[str, Any]) -> Config:
    try:
        return Config.from_flat(settings).resolved()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return the settings of a file, by name.

    Raises ValueError if it is no mapping, or has two names of one setting.
    """
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain `name: value` lines, got {type(content).__name__}")
    if "recipes" in content:
        raise ValueError(f"{path} is a file of recipes; run it with scripts.compare_recipes")
    content.pop(ENVIRONMENT, None)
    content = {str(name): value for name, value in content.items()}
    if OBJECTIVE in content:  # decides which others are read, before it is checked
        content[OBJECTIVE] = str(content[OBJECTIVE])
    try:
        return translate(content, {})[0]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _own_leaves(objective: str | None) -> dict[str, Leaf]:
    """Return the settings of a custom objective; none of a built-in or invalid one."""
    if objective is None or objective in BUILT_IN or ".py:" not in objective:
        return {}
    try:
        return leaves_of(settings_class(objective))
    except ValueError:  # reported with the other problems
        return {}


def _of_objective(inherited: Mapping[str, Any], objective: str | None) -> dict[str, Any]:
    """Return the settings of a file without those of its own objective, if a flag chooses another
    one.
    """
    before = inherited.get(OBJECTIVE, LEAVES[OBJECTIVE].default)
    if objective in (None, before):
        return dict(inherited)
    try:
        cls = settings_class(objective)
    except ValueError:  # reported with the other problems
        return dict(inherited)
    dropped = [name for name in inherited if objectives_with(name) and name not in cls.model_fields]
    if cls.videos_from:  # a trust region and a group of rollouts do not fit given videos
        own = [name for name in cls.model_fields if name not in ObjectiveSettings.model_fields]
        dropped += [name for name in (*own, "num_generations") if name in inherited]
    if dropped and processes.rank() == 0:
        print(
            f"settings of the file that are not those of objective {objective} are ignored: "
            f"{', '.join(dropped)}",
            file=sys.stderr,
        )
    return {name: value for name, value in inherited.items() if name not in dropped}


def _machine_parser() -> Parser:
    """Return the parser of the flags that are no part of a run: the plan, and its machine."""
    parser = Parser(usage=USAGE, add_help=False)
    parser.add_argument(
        "--print_config",
        action="store_true",
        help="print settings and plan, then exit",
    )
    machine = parser.add_argument_group("the plan of another machine")
    for flag, (kind, sentence) in MACHINE.items():
        metavar = {int: "INT", float: "NUMBER", str: "NAME"}[kind]
        machine.add_argument(f"--{flag}", type=kind, metavar=metavar, help=sentence)
    return parser


def _choice_parser() -> Parser:
    """Return the parser of the flags on which the other settings depend."""
    parser = Parser(usage=USAGE, add_help=False)
    parser.add_argument("--config")
    parser.add_argument("--objective")
    return parser


def _parser(objective: str | None, words: Iterable[str]) -> argparse.ArgumentParser:
    """Return the parser of post_train.py for these words, whose help has the settings of an
    objective if one is named.
    """
    parser = Parser(
        "Post-train a video flow-matching model with SAGE-GRPO. Flags override the settings of "
        "--config FILE.yaml.\n"
        "Flags of the public reference that have another name here are accepted: see "
        "docs/coming_from_other_code.md#flags-of-the-public-reference.",
        usage=USAGE,
        argument_default=argparse.SUPPRESS,
        parents=[_machine_parser()],
    )
    parser.add_argument("--config", default=None, metavar="FILE.yaml", help="YAML file of settings")
    parser.add_argument(
        "--pilot",
        action="store_true",
        default=False,
        help="run two iterations and compare them with the plan",
    )
    for section in Config.model_fields:
        if section == OBJECTIVE:
            _add_objective(parser, objective)
            continue
        cls = SECTIONS[section]
        add_section(parser, f"{section}: {cls.__doc__}", leaves_of(cls))
    for flag, name in RENAMED.items():
        options = flag_options(LEAVES[name]) | {"help": argparse.SUPPRESS}
        parser.add_argument(f"--{flag}", **options)
    add_flags(parser, words)
    return parser


def _add_objective(parser: argparse.ArgumentParser, objective: str | None) -> None:
    """Add the flags of the objective, and hidden ones of the others, so that they can be named in a
    message.
    """
    chosen = objective or LEAVES[OBJECTIVE].default
    own = leaves_of(BUILT_IN[chosen]) if chosen in BUILT_IN else _own_leaves(chosen)
    title = f"objective {chosen}"
    if objective is None:
        title += "; with --objective NAME, --help shows the settings of another one"
    add_section(parser, title, {OBJECTIVE: LEAVES[OBJECTIVE]} | own)
    for name in LEAVES:
        if objectives_with(name) and name not in own:
            options = flag_options(LEAVES[name]) | {"help": argparse.SUPPRESS}
            parser.add_argument(f"--{name}", **options)


def add_section(
    parser: argparse.ArgumentParser, title: str, leaves: Mapping[str, Leaf], **options: Any
) -> None:
    """Add the flags of a section to a parser; a title of several lines also describes them."""
    title, _, description = inspect.cleandoc(title).partition("\n")
    group = parser.add_argument_group(title.rstrip("."), description.strip())
    for name, leaf in leaves.items():
        group.add_argument(f"--{name}", **flag_options(leaf), **options)


def flag_options(leaf: Leaf, sentence: str = "") -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a setting; ``sentence`` replaces its help."""
    kind = leaf.kind
    words = leaf.default
    if isinstance(words, bool):
        words = str(words).lower()
    elif isinstance(words, list):
        words = " ".join(map(str, words))
    text = sentence or leaf.sentence
    if words not in (None, "", {}) and not sentence:
        text += f" (default: {words})"
    options: dict[str, Any] = {"help": text.replace("%", "%%")}
    if kind in (bool, Switch):
        return options | {"nargs": "?", "const": "true", "metavar": "BOOL"}
    if leaf.is_list:
        metavar = {int: "INT", float: "NUMBER"}.get(leaf.element, "NAME")
        return options | {"nargs": "+", "metavar": metavar}
    if get_origin(kind) is dict:
        return options | {"metavar": "JSON"}
    if get_origin(kind) is Literal:
        return options | {"metavar": "|".join(get_args(kind))}
    if leaf.choices:
        return options | {"metavar": "|".join([*leaf.choices, "FILE.py:NAME"])}
    if kind == NoiseScale:
        return options | {"metavar": "NUMBER|SAMPLER:ETA"}
    return options | {"metavar": {str: "TEXT", Path: "PATH", int: "INT", float: "NUMBER"}[kind]}
