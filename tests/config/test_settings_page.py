"""docs/settings.md is made from the traits of the settings:  python -m tests.config.test_settings_page"""

import dataclasses
from typing import Literal, get_args, get_origin

from hyvideo.config.setting import Switch
from hyvideo.config.settings import SECTIONS, TRAITS, Config
from tests.forked import ROOT

PAGE = ROOT / "docs/settings.md"
HEAD = """# Settings

Every flag of `post_train.py`, which also is a line of a YAML file for `--config`. Flags override the file.
`--print_config` shows what a run would use, and what has no effect in it. This page is made from
`hyvideo/config/sections.py` by `python -m tests.config.test_settings_page`; do not edit it.

The column *decides* says what a setting decides, and so whether a run may go on with another value of it:

| decides | | a run that goes on |
|---|---|---|
| learning | samples, rewards or updates: with another value it is another experiment | refuses another value |
| layout | how the rollouts of an iteration are dealt | takes another value where their number stays |
| machine | how and how far a run computes, not what it learns | takes another value |
| records | what is kept of a run, and where | takes another value |
| start | how this start goes, and nothing after it | takes another value |

Flags of the public reference with other names here: [reference_flags.md](reference_flags.md).
"""
COLUMNS = "| setting | type | default | decides | |\n|---|---|---|---|---|"


def kind_of(field):
    """Type of a setting in words, with its range where that is more than "not negative"."""
    traits, kind = TRAITS[field.name], field.type
    if kind is Switch or get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is list:
        return "texts"
    types = [one for one in (get_args(kind) or (kind,)) if one is not type(None)]
    bounds = [
        ("above", traits.above),
        ("from", traits.at_least or None),
        ("to", traits.at_most),
        ("below", traits.below),
    ]
    words = [f"{word} {value:g}" for word, value in bounds if value is not None]
    return " ".join([{bool: "truth value", int: "integer", float: "number", str: "text"}[types[0]], *words])


def shown(value):
    words = " ".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else value
    return "" if words in ("", None) else f"`{words}`"


def page():
    parts, defaults = [HEAD], Config().flat()
    for section, cls in SECTIONS.items():
        parts.append(
            f"\n## {section}\n\n{cls.__doc__}\n\n| setting | type | default | decides | |\n|---|---|---|---|---|\n"
        )
        for field in dataclasses.fields(cls):
            traits = TRAITS[field.name]
            cells = [f"`{field.name}`", kind_of(field), shown(defaults[field.name]), traits.decides]
            parts.append(f"| {' | '.join(cells)} | {traits.sentence.replace('|', ' or ').replace('<', '&lt;')} |\n")
    return "".join(parts).replace("|  |", "| |")


def test_the_page_of_the_settings_is_the_one_of_today():
    assert PAGE.read_text(encoding="utf-8") == page(), "make it again: python -m tests.config.test_settings_page"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
