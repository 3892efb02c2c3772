"""The tables of docs/settings.md, from the traits of the settings."""

from collections.abc import Iterable
from typing import Literal, get_args, get_origin

from hyvideo.models.versions import ANNOUNCED, RELEASED
from hyvideo.settings.config import LEAVES, OBJECTIVE, SECTIONS, Config
from hyvideo.settings.objectives import BUILT_IN
from hyvideo.settings.sections import Leaf, NoiseScale, Switch, leaves_of

_LIMITS = {"gt": "above", "ge": "at least", "le": "at most", "lt": "below"}


def all_settings() -> str:
    """Return the tables of all settings, each below the heading of its section."""
    parts = []
    for section in Config.model_fields:
        if section != OBJECTIVE:
            parts.append(_table(section, leaves_of(SECTIONS[section]).values()))
            continue
        parts.append(_table(section, [LEAVES[OBJECTIVE]]))
        for name, cls in BUILT_IN.items():
            parts.append(_table(f"objective {name}", leaves_of(cls).values()))
    return "\n\n".join(parts)


def defaults_by_version() -> str:
    """Return the table of the settings that are unset by default and that the version sets."""
    unset, resolved = Config().flat(), Config().resolved().flat()
    names = [name for name in unset if unset[name] is None and resolved[name] is not None]
    rows = [["version", *(f"`{name}`" for name in names)], ["---"] * (len(names) + 1)]
    for version in [*RELEASED, *ANNOUNCED]:
        values = Config.of_version(version).flat()
        rows.append([f"`{version}`", *(_short(values[name]) for name in names)])
    return "\n".join(map(_row, rows))


def _table(title: str, leaves: Iterable[Leaf]) -> str:
    rows = [["setting", "type", "default", "affects", "description"], ["---"] * 5]
    for leaf in leaves:
        sentence = leaf.sentence.replace("|", " or ").replace("<", "&lt;")
        rows.append(
            [f"`{leaf.name}`", _type_of(leaf), _quoted(leaf.default), leaf.decides, sentence]
        )
    return "\n".join([f"## {title}", *map(_row, rows)])


def _row(cells: list[str]) -> str:
    if set(cells) == {"---"}:
        return f"|{'|'.join(cells)}|"
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def _type_of(leaf: Leaf) -> str:
    """Return the type of a setting, and its range if it is more than "not negative"."""
    kind = leaf.kind
    if kind is Switch or get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(leaf.element) is Literal:
        return "list of " + ", ".join(f"`{choice}`" for choice in get_args(leaf.element))
    if leaf.is_list:
        return "list of numbers" if leaf.element is float else "list of text"
    if get_origin(kind) is dict:
        return "JSON"
    if kind == NoiseScale:
        return "number, at most 1000, or `SAMPLER:ETA`"
    words = [{bool: "bool", int: "integer", float: "number", str: "text"}[kind]]
    for limit, word in _LIMITS.items():
        values = [getattr(each, limit) for each in leaf.field.metadata if hasattr(each, limit)]
        words += [f"{word} {value:g}" for value in values if (limit, value) != ("ge", 0)]
    return ", ".join(words)


def _quoted(value: object) -> str:
    words = value
    if isinstance(value, list):
        words = " ".join(map(str, value))
    elif isinstance(value, bool):
        words = str(value).lower()
    return "" if words in ("", None, {}) else f"`{words}`"


def _short(value: float | str) -> str:
    """Return a default of a version; only the first characters of a negative prompt, which is
    long.
    """
    if isinstance(value, str):
        return value if len(value) <= 8 else f"{value[:4]}..."
    return f"{value:g}"
