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

from hyvideo.data.cli import TRUTHS
from hyvideo.data.text import quote
from hyvideo.models.versions import version_defaults
from hyvideo.settings import processes
from hyvideo.settings.config import LEAVES, SettingsError, value_of

# Names in the table that are no settings.
TASK = "task"  # must be the task of transformer_version
ANCHOR, TERMS = "kl_anchor", "kl_terms"  # parts of kl_strategy
NO_SETTINGS = (TASK, ANCHOR, TERMS)


class FlagRow(NamedTuple):
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
    value: Any
    row: FlagRow


@functools.cache
def table(program: Literal["post_train", "generate"]) -> dict[str, FlagRow]:
    """Return the rows of a program by flag; a flag may end in ``*``."""
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {flag: FlagRow(**row) for flag, row in content[program].items()}


def add_flags(
    parser: argparse.ArgumentParser, words: Iterable[str], rows: Mapping[str, FlagRow]
) -> list[str]:
    """Add the flags of the reference that occur in ``words`` to a parser, and return their
    names.
    """
    given = (word[2:].partition("=")[0] for word in words if word.startswith("--"))
    names = flags_in(given, rows)
    for name, row in names.items():
        needs_value = row.sets or row.values and True not in row.values
        parser.add_argument(f"--{name}", nargs="+" if needs_value else "*", help=argparse.SUPPRESS)
    return list(names)


def take_flags(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Remove the flags of the reference from parsed options, and return the word or the words of
    each.
    """
    given = {name: options.pop(name) or ["true"] for name in names if options.get(name) is not None}
    return {name: words if len(words) > 1 else words[0] for name, words in given.items()}


def flags_in(names: Iterable[str], rows: Mapping[str, FlagRow]) -> dict[str, FlagRow]:
    """Return the rows of the names that are flags of the reference."""
    return {
        name: row for name in names for flag, row in rows.items() if fnmatch.fnmatchcase(name, flag)
    }


def meanings(
    given: Mapping[str, Any], rows: Mapping[str, FlagRow], known: Mapping[str, Any]
) -> tuple[list[Meaning], dict[str, list[str]]]:
    """Return the settings that flags stand for, and the flags without an effect, by reason.

    ``given`` has the words of each flag, or its value in a file; ``known`` are settings that are
    given elsewhere. Raises ValueError for an unsupported value.
    """
    found: list[Meaning] = []
    ignored: dict[str, list[str]] = {}
    for flag, row in flags_in(given, rows).items():
        value = given[flag]
        words = [str(word) for word in value] if isinstance(value, list) else [str(value)]
        text = " ".join([flag, *(word or '""' for word in words)])
        if row.needs and row.needs not in given and not known.get(row.sets[0]):
            raise ValueError(
                f"{text} has no effect in the reference without {row.needs}; add {row.needs} true"
            )
        if row.needs in given and not _is(given[row.needs], True):
            ignored.setdefault(f"{row.needs} is false", []).append(text)
            continue
        if row.no_effect:
            ignored.setdefault(row.no_effect, []).append(text)
        chosen = [row.values[each] for each in row.values if _is(value, each)]
        if chosen:
            found += [Meaning(name, flag, each, row) for name, each in chosen[0].items()]
        elif len(row.sets) > 1:
            sides = re.fullmatch(r"([1-9][0-9]{0,4})[xX*]([1-9][0-9]{0,4})", " ".join(words))
            if not sides:
                raise ValueError(
                    f"{quote(text)[1:-1]} is not a size; write height x width, such as 480x864"
                )
            parts = zip(row.sets, sides.groups())
            found += [Meaning(name, flag, int(side), row) for name, side in parts]
        elif row.sets:
            found.append(Meaning(row.sets[0], flag, value, row))
        elif row.values or row.only and not any(_is(value, each) for each in row.only):
            raise ValueError(f"{quote(text)[1:-1]} is not supported: {row.rejected}")
    return found, ignored


def print_ignored(ignored: Mapping[str, list[str]]) -> None:
    """Print the flags that have no effect, by reason, on stderr of rank 0."""
    for reason, texts in ignored.items():
        if processes.rank() == 0:
            print(f"ignored flags: {quote(', '.join(texts), 500)[1:-1]}; {reason}", file=sys.stderr)


def translate(
    given: Mapping[str, Any], by_flag: Mapping[str, Any], inherited: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of flags or of a file, and the name that gave each.

    ``given`` are settings, and ``by_flag`` has the words or the value of each flag of the
    reference. Both override the ``inherited`` settings. Raises ValueError for contradicting names
    or unsupported values.
    """
    values, names = dict(given), {name: name for name in given}
    found, ignored = meanings(by_flag, table("post_train"), {**inherited, **given})
    for setting, flag, value, row in sorted(found, key=lambda meaning: meaning.row.unless_set):
        value, before = _checked(setting, flag, value), None
        if setting in values:
            before = _checked(setting, names[setting], values[setting])
        if row.unless_set and value and (before or inherited.get(setting)):
            continue
        if before not in (None, value):
            same = "they are two names of one setting" if row.sets else "they contradict each other"
            raise ValueError(
                f"{names[setting]} and {flag} set {setting} to {before!r} and {value!r}; "
                f"{row.conflict or same}: remove one of them"
            )
        values[setting], names[setting] = value, flag
    parts = {name: values.pop(name) for name in (ANCHOR, TERMS) if name in values}
    if parts and "kl_strategy" in values:
        ignored["kl_strategy chooses the KL terms"] = [
            f"{names[part]} {by_flag[names[part]]}" for part in parts
        ]
    elif parts:
        values["kl_strategy"] = kl_strategy(parts, str(inherited.get("kl_strategy", "")))
    _check_task(values.pop(TASK, None), inherited | values)
    print_ignored(ignored)
    return values, names


def _checked(setting: str, flag: str, value: Any) -> Any:
    """Return the value of a setting that a flag gives. Raises ValueError if it is invalid."""
    if setting in NO_SETTINGS:
        return value
    try:
        return value_of(setting, value)
    except SettingsError as error:
        raise ValueError(with_flags(str(error), {setting: flag})) from error


def _check_task(task: str | None, values: Mapping[str, Any]) -> None:
    """Raise ValueError if a version does not have the task."""
    version = str(values.get("transformer_version", LEAVES["transformer_version"].default))
    expected = version_defaults(version).task
    if task and expected not in (None, task, "ti2v"):
        raise ValueError(
            f"task_type must be {expected} for transformer_version {version}, got {task}; change "
            "one"
        )


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """Return a message in which settings that were given under another flag also show that flag."""
    for setting, flag in flags.items():
        if setting != flag and setting not in NO_SETTINGS:
            message = re.sub(rf"\b{setting}\b", f"{setting} (given as --{flag})", message, count=1)
    return message


def kl_strategy(parts: Mapping[str, str], inherited: str) -> str:
    """Return the ``kl_strategy`` of its parts, which the switches of the reference set; a part that
    is not given comes from the ``inherited`` strategy.
    """
    anchor = parts.get(ANCHOR, "fixed" if inherited.endswith("fixed") else "moving")
    terms = parts.get(TERMS, "single" if inherited in ("fixed", "moving") else "dual")
    return anchor if terms == "single" else f"dual_{anchor}"


def _is(value: object, expected: object) -> bool:
    """Return whether a word, or a value of a file, is a value of the table."""
    text = str(value).lower()
    if isinstance(expected, bool):
        return TRUTHS.get(text) is expected
    try:
        return float(text) == float(str(expected))
    except ValueError:
        return text == str(expected).lower()
