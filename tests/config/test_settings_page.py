"""Generates docs/settings.md from the traits of the settings:  python -m tests.config.test_settings_page"""

import dataclasses
from typing import Literal, get_args, get_origin

from hyvideo.config.setting import Switch
from hyvideo.config.settings import SECTIONS, TRAITS, Config
from tests.forked import ROOT

PAGE = ROOT / "docs/settings.md"
HEAD = """# Settings

All settings of `post_train.py`. Each is a flag and a line of the YAML file for `--config`; flags override the file.
`--print_config` prints the resolved settings of a run and those that have no effect in it. This page is generated from
`hyvideo/config/sections.py` by `python -m tests.config.test_settings_page`; do not edit it.

The column *affects* shows what a setting affects and, therefore, whether a resumed run accepts a changed value:

| affects | meaning | changed value on resume |
|---|---|---|
| learning | samples, rewards or updates | error, unless `allow_changed_settings` is true |
| layout | how the rollouts of an iteration are distributed | accepted if their number stays |
| machine | how and how long a run computes, but not what it learns | accepted |
| records | which outputs are kept, and where | accepted |
| start | this start of the program only | accepted |

Flags of the public reference that have another name here: [reference_flags.md](reference_flags.md).
"""


def type_of(field):
    """Return the type of a setting, and its range if it is more than "not negative"."""
    traits, kind = TRAITS[field.name], field.type
    if kind is Switch or get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is list:
        return "list of text"
    types = [member for member in (get_args(kind) or (kind,)) if member is not type(None)]
    bounds = [
        ("above", traits.above),
        ("at least", traits.at_least or None),
        ("at most", traits.at_most),
        ("below", traits.below),
    ]
    words = [f"{word} {value:g}" for word, value in bounds if value is not None]
    return ", ".join([{bool: "bool", int: "integer", float: "number", str: "text"}[types[0]], *words])


def quote(value):
    words = " ".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else value
    return "" if words in ("", None) else f"`{words}`"


def page():
    parts, defaults = [HEAD], Config().flat()
    for section, cls in SECTIONS.items():
        parts.append(
            f"\n## {section}\n\n{cls.__doc__}\n\n"
            "| setting | type | default | affects | description |\n|---|---|---|---|---|\n"
        )
        for field in dataclasses.fields(cls):
            traits = TRAITS[field.name]
            cells = [f"`{field.name}`", type_of(field), quote(defaults[field.name]), traits.decides]
            parts.append(f"| {' | '.join(cells)} | {traits.sentence.replace('|', ' or ').replace('<', '&lt;')} |\n")
    return "".join(parts).replace("|  |", "| |")


def test_the_settings_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "regenerate it: python -m tests.config.test_settings_page"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
