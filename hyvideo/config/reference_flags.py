"""Flags of the public reference that have another name here, or none: one table, reference_flags.yaml, and its reading.

Values are words, as on a command line; whoever knows a setting's type makes values of them.
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

from hyvideo.config import processes
from hyvideo.config.setting import TRUTHS
from hyvideo.data.outside import shown

TASK = "task"  # what task_type sets, which is no setting: the transformer's version must agree


class Row(NamedTuple):
    """A flag of the reference and what it is here; the table says what each column means."""

    default: object
    sets: tuple[str, ...] = ()
    values: Mapping[object, dict[str, object]] = {}
    unless_set: bool = False
    needs: str = ""
    only: tuple = ()
    no_effect: str = ""
    refused: str = ""
    one: str = ""


class Meaning(NamedTuple):
    """A setting that a flag of the reference stands for."""

    setting: str
    flag: str
    words: list[str]
    row: Row


@functools.cache
def table(program: Literal["post_train", "generate"]) -> dict[str, Row]:
    """The rows of a program by their flags, of which one may end in ``*``."""
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {flag: Row(**row) for flag, row in content[program].items()}


def add_flags(parser: argparse.ArgumentParser, words: Iterable[str], rows: Mapping[str, Row]) -> list[str]:
    """Makes a parser take those flags of the reference that are among the words; gives their names."""
    names = [*flags_in((word[2:].partition("=")[0] for word in words if word.startswith("--")), rows)]
    for name in names:
        parser.add_argument(f"--{name}", nargs="*", help=argparse.SUPPRESS)
    return names


def flags_in(names: Iterable[str], rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows of those names that are flags of the reference."""
    return {name: row for name in names for flag, row in rows.items() if fnmatch.fnmatchcase(name, flag)}


def meanings(given: Mapping[str, list[str]], rows: Mapping[str, Row], known: Mapping[str, Any]) -> list[Meaning]:
    """The settings that flags with their words stand for; says on stderr which have no effect, and why.

    ``known`` are settings that are given otherwise. Raises ValueError for a value that would change what it cannot.
    """
    found: list[Meaning] = []
    idle: dict[str, list[str]] = {}
    for flag, row in flags_in(given, rows).items():
        if not given[flag] and (row.sets or row.values and True not in row.values):
            raise ValueError(f"{flag} takes a value, got nothing")
        words = given[flag] or ["true"]
        text = " ".join([flag, *(word or '""' for word in words)])
        switch = given.get(row.needs)
        if row.needs and switch is None and not known.get(row.sets[0]):
            raise ValueError(f"{text} does nothing in the reference without {row.needs}; add {row.needs} true")
        if switch and not _is(switch, True):
            idle.setdefault(f"{row.needs} is false", []).append(text)
            continue
        chosen = next((row.values[value] for value in row.values if _is(words, value)), None)
        if chosen is not None:
            found += [Meaning(name, flag, [str(value)], row) for name, value in chosen.items()]
        elif row.only and not any(_is(words, value) for value in row.only) or row.values and not row.sets:
            raise ValueError(f"{shown(text)[1:-1]} is refused: {row.refused}")
        else:
            found += [Meaning(name, flag, part, row) for name, part in zip(row.sets, _parts(row, text, words))]
        if row.no_effect and not chosen:
            idle.setdefault(row.no_effect, []).append(text)
    say_no_effect(idle)
    return found


def say_no_effect(idle: Mapping[str, list[str]]) -> None:
    """Prints which flags change nothing, by the reason why, on stderr of one process."""
    for reason, texts in idle.items():
        if processes.rank() == 0:
            print(f"ignored flags: {shown(', '.join(texts), 500)[1:-1]}; {reason}", file=sys.stderr)


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """A message on settings with the flags, by setting, that they were given as where these have another name."""
    for setting, flag in flags.items():
        if setting not in (flag, TASK):
            message = re.sub(rf"\b{setting}\b", f"{setting} (given as --{flag})", message, count=1)
    return message


def size_of_text(text: str) -> tuple[str, str] | None:
    """Height and width of ``480x864``, both above 0; None for other text."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})[xX*]([1-9][0-9]{0,4})", text)
    return (match[1], match[2]) if match else None


def _parts(row: Row, text: str, words: list[str]) -> list[list[str]]:
    """The words for each of the row's settings."""
    if len(row.sets) < 2:
        return [words]
    if len(words) != 1 or not (size := size_of_text(words[0])):
        raise ValueError(f"{shown(text)[1:-1]} is no size; write height x width, such as 480x864")
    return [[side] for side in size]


def _is(words: list[str], value: object) -> bool:
    """Claims that words say a value of the table: as truth values, as numbers, or as text."""
    if len(words) != 1:
        return False
    if isinstance(value, bool):
        return TRUTHS.get(words[0].lower()) is value
    try:
        return float(words[0]) == float(str(value))
    except ValueError:
        return words[0].lower() == str(value).lower()
