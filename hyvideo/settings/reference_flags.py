"""Flags of the public reference that have another name here, or none, as listed in
reference_flags.yaml.

`translate` turns the flags of a command line and the names of a file into settings before anything
else sees them.
"""

import argparse
import fnmatch
import functools
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from hyvideo.data.text import quote
from hyvideo.models.versions import version_defaults
from hyvideo.settings import processes
from hyvideo.settings.config import LEAVES, in_form
from hyvideo.settings.values import TRUTHS, value_of_words, value_of_yaml

REFERENCE_SCORERS = {"videoalign_local": "videoalign"}  # names of scorers
# Names in the table that are no settings.
TASK = "task"  # must be the task of transformer_version
ANCHOR, TERMS = "kl_anchor", "kl_terms"  # parts of kl_strategy
NO_SETTINGS = (TASK, ANCHOR, TERMS)
SWITCHES = ("use_moving_KL", "use_dual_kl")


class Row(NamedTuple):
    """Flag of the reference and its meaning here; the table describes the columns."""

    default: object
    sets: tuple[str, ...] = ()
    values: Mapping[object, dict[str, object]] = {}
    unless_set: bool = False
    needs: str = ""
    only: tuple = ()
    no_effect: str = ""
    rejected: str = ""
    conflict: str = ""


class Meaning(NamedTuple):
    """Setting that a flag of the reference stands for."""

    setting: str
    flag: str
    words: list[str]
    row: Row


@functools.cache
def table(program: Literal["post_train", "generate"]) -> dict[str, Row]:
    """Return the rows of a program by flag; a flag may end in ``*``."""
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {flag: Row(**row) for flag, row in content[program].items()}


def add_flags(
    parser: argparse.ArgumentParser, words: Iterable[str], rows: Mapping[str, Row]
) -> list[str]:
    """Add the flags of the reference that occur in ``words`` to a parser, and return their
    names.
    """
    names = list(
        flags_in((word[2:].partition("=")[0] for word in words if word.startswith("--")), rows)
    )
    for name in names:
        parser.add_argument(f"--{name}", nargs="*", help=argparse.SUPPRESS)
    return names


def flags_in(names: Iterable[str], rows: Mapping[str, Row]) -> dict[str, Row]:
    """Return the rows of the names that are flags of the reference."""
    return {
        name: row for name in names for flag, row in rows.items() if fnmatch.fnmatchcase(name, flag)
    }


def meanings(
    given: Mapping[str, list[str]], rows: Mapping[str, Row], known: Mapping[str, Any]
) -> list[Meaning]:
    """Return the settings that flags stand for; ``known`` are given elsewhere.

    ValueError for an unsupported value.
    """
    found: list[Meaning] = []
    ignored: dict[str, list[str]] = {}
    for flag, row in flags_in(given, rows).items():
        if not given[flag] and (row.sets or row.values and True not in row.values):
            raise ValueError(f"{flag} needs a value, got nothing")
        words = given[flag] or ["true"]
        text = " ".join([flag, *(word or '""' for word in words)])
        switch = given.get(row.needs)
        if row.needs and switch is None and not known.get(row.sets[0]):
            raise ValueError(
                f"{text} has no effect in the reference without {row.needs}; add {row.needs} true"
            )
        if switch and not _is(switch, True):
            ignored.setdefault(f"{row.needs} is false", []).append(text)
            continue
        chosen = next((row.values[value] for value in row.values if _is(words, value)), None)
        if chosen is not None:
            found += [Meaning(name, flag, [str(value)], row) for name, value in chosen.items()]
        elif (
            row.only
            and not any(_is(words, value) for value in row.only)
            or row.values
            and not row.sets
        ):
            raise ValueError(f"{quote(text)[1:-1]} is not supported: {row.rejected}")
        else:
            sides = re.fullmatch(r"([1-9][0-9]{0,4})[xX*]([1-9][0-9]{0,4})", " ".join(words))
            if len(row.sets) > 1 and not sides:
                raise ValueError(
                    f"{quote(text)[1:-1]} is not a size; write height x width, such as 480x864"
                )
            parts = [[side] for side in sides.groups()] if len(row.sets) > 1 else [words]
            found += [Meaning(name, flag, part, row) for name, part in zip(row.sets, parts)]
        if row.no_effect and not chosen:
            ignored.setdefault(row.no_effect, []).append(text)
    print_ignored(ignored)
    return found


def print_ignored(ignored: Mapping[str, list[str]]) -> None:
    """Print the flags that have no effect, by reason, on stderr of rank 0."""
    for reason, texts in ignored.items():
        if processes.rank() == 0:
            print(f"ignored flags: {quote(', '.join(texts), 500)[1:-1]}; {reason}", file=sys.stderr)


def print_ignored_switches(words_by_flag: Mapping[str, list[str]]) -> None:
    """Print the given switches of the KL terms, which have no effect beside ``--kl_strategy``."""
    switches = [
        " ".join([name, *words_by_flag[name]]) for name in SWITCHES if name in words_by_flag
    ]
    if switches:
        print_ignored({"kl_strategy chooses the KL terms": switches})


def translate(
    given: Mapping[str, Any], by_flag: Mapping[str, list[str]], inherited: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of flags or of a file, and the name that gave each.

    ``given`` are settings, and ``by_flag`` has the words of each flag of the reference. Both
    override the ``inherited`` settings. Raises ValueError for contradicting names or unsupported
    values.
    """
    values, names = dict(given), {name: name for name in given}
    found = meanings(by_flag, table("post_train"), {**inherited, **given})
    for setting, flag, words, row in sorted(found, key=lambda meaning: meaning.row.unless_set):
        value = words[0] if setting in NO_SETTINGS else _value_of_words(setting, flag, words)
        if row.unless_set and value and (values.get(setting) or inherited.get(setting)):
            continue
        if setting in values and in_form(setting, values[setting]) != value:
            texts = (
                " ".join(v) if isinstance(v, list) else v
                for v in (in_form(setting, values[setting]), value)
            )
            both = f"{names[setting]} and {flag} set {setting} to {' and '.join(map(quote, texts))}"
            why = row.conflict or (
                "they are two names of one setting" if row.sets else "they contradict each other"
            )
            raise ValueError(f"{both}; {why}: remove one of them")
        values[setting], names[setting] = value, flag
    strategy = inherited.get("kl_strategy", LEAVES["kl_strategy"].default)
    return with_kl_strategy(values, strategy), names


def _value_of_words(name: str, flag: str, words: list[str]) -> Any:
    try:
        return value_of_words(LEAVES[name], words)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{flag} {error}") from error


def words_of_yaml(row: Row, value: object) -> list[str]:
    """Return the words of a reference flag. Raises TypeError for a value of the wrong type."""
    value = "none" if value is None and ("none" in row.values or not row.sets) else value
    if len(row.sets) == 1:
        value = value_of_yaml(LEAVES[row.sets[0]], value)
    return [str(word) for word in (value if isinstance(value, list) else [value])] or [""]


def resolve_reference_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the reference's task and scorer names.

    Raises ValueError if one is wrong or ambiguous.
    """
    version = values.get("transformer_version", LEAVES["transformer_version"].default)
    task, known = values.pop(TASK, None), version_defaults(version)
    expected = known.task or task
    if task not in (None, expected) and expected != "ti2v":
        raise ValueError(
            f"task_type must be {expected} for transformer_version {version}, got {task}; change "
            "one"
        )
    if "reward_model" in values:
        scorers = in_form("reward_model", values["reward_model"])
        values["reward_model"] = [REFERENCE_SCORERS.get(name, name) for name in scorers]
    if task:
        print_ignored({table("post_train")["task_type"].no_effect: [f"task_type {task}"]})
    return values


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """Return a message in which settings that were given under another flag also show that flag."""
    for setting, flag in flags.items():
        if setting != flag and setting not in NO_SETTINGS:
            message = re.sub(rf"\b{setting}\b", f"{setting} (given as --{flag})", message, count=1)
    return message


def with_kl_strategy(settings: Mapping[str, Any], inherited: str) -> dict[str, Any]:
    """Return settings with ``kl_strategy`` instead of its parts, which the switches of the
    reference set.

    A part that is not given comes from the ``inherited`` strategy. A given ``kl_strategy``
    overrides both parts.
    """
    values = dict(settings)
    anchor = values.pop(ANCHOR, None)
    terms = values.pop(TERMS, None)
    if "kl_strategy" in values or (anchor is None and terms is None):
        return values
    if anchor is None:
        anchor = "fixed" if inherited.endswith("fixed") else "moving"
    if terms is None:
        terms = "single" if inherited in ("fixed", "moving") else "dual"
    values["kl_strategy"] = anchor if terms == "single" else f"dual_{anchor}"
    return values


def _is(words: list[str], value: object) -> bool:
    """Return whether words equal a value of the table, as bool, number or text."""
    if len(words) != 1:
        return False
    if isinstance(value, bool):
        return TRUTHS.get(words[0].lower()) is value
    try:
        return float(words[0]) == float(str(value))
    except ValueError:
        return words[0].lower() == str(value).lower()
