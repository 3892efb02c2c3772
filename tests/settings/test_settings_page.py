"""docs/settings.md is generated from the traits of the settings."""

import dataclasses
from typing import Literal, get_args, get_origin

from hyvideo.models.versions import ANNOUNCED, RELEASED
from hyvideo.settings.config import LEAVES, SECTIONS, Config, value_type
from hyvideo.settings.sections import Switch
from tests.forked import ROOT

PAGE = ROOT / "docs/settings.md"
HEAD = """# Settings

All settings of `post_train.py`. Each is a flag and a line of the YAML file for `--config`; flags override the file.
`--print_config` prints the resolved settings of a run and warns of settings that look as if they had an effect in it,
but have none. Flags of the public reference that have another name here: [reference_flags.md](reference_flags.md). This
page is generated from `hyvideo/settings/sections.py` by
`python -m pytest tests/config/test_settings_page.py --regenerate`.

The [model version](#defaults-by-version) sets some defaults.

*Affects* states what a setting changes, and whether a resumed run accepts another value:

| affects | meaning | another value on resume |
|---|---|---|
| *learning* | what the policy learns | an error, unless `allow_changed_settings` names the setting |
| *layout* | how rollouts are divided into batches | accepted if their number per iteration stays |
| *machine* | speed, memory and when the run ends | accepted |
| *records* | what is measured and written | accepted |
| *start* | how the run starts | accepted |
"""
TAIL = """
## Defaults by version

Training and `generate.py` use these values unless a flag or the YAML file sets the setting. The `config.yaml` of a run
contains the values that the run used. `--negative_prompt=` sets an empty negative prompt. Any other version has the
values of `480p_t2v`, but 40 steps. Without a run, `generate.py` also makes videos of the version's length: 81 frames
for Wan2.1, and 121 for the others. `wan2.2_ti2v_5b_fastwan` has its own noise levels (`sigmas`) in place of a shift.
`versions.yaml` in the package of each family declares all values.

"""


def type_of(field):
    """Return the type of a setting, and its range if it is more than "not negative"."""
    traits, kind = LEAVES[field.name], value_type(field.name)
    if kind is Switch or get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is list:
        return "list of text"
    bounds = [
        ("above", traits.above),
        ("at least", traits.at_least or None),
        ("at most", traits.at_most),
        ("below", traits.below),
    ]
    words = [f"{word} {value:g}" for word, value in bounds if value is not None]
    return ", ".join([{bool: "bool", int: "integer", float: "number", str: "text"}[kind], *words])


def quote(value):
    words = (
        " ".join(value)
        if isinstance(value, list)
        else str(value).lower()
        if isinstance(value, bool)
        else value
    )
    return "" if words in ("", None) else f"`{words}`"


def cell(value):
    """Return a default of a version; only the first characters of a negative prompt, which is
    long.
    """
    if isinstance(value, str):
        return value if len(value) <= 8 else f"{value[:4]}..."
    return f"{value:g}"


def defaults_by_version():
    """Return the table of the settings that are unset by default and that the version sets."""
    unset, resolved = Config().flat(), Config().resolved().flat()
    names = [name for name in unset if unset[name] is None and resolved[name] is not None]
    lines = [
        f"| version | {' | '.join(f'`{name}`' for name in names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for version in [*RELEASED, *ANNOUNCED]:
        values = Config.of_version(version).flat()
        lines.append(f"| `{version}` | {' | '.join(cell(values[name]) for name in names)} |")
    return "\n".join(lines) + "\n"


def page():
    parts, defaults = [HEAD], Config().flat()
    for section, cls in SECTIONS.items():
        parts.append(
            f"\n## {section}\n| setting | type | default | affects | description |\n"
            "|---|---|---|---|---|\n"
        )
        for field in dataclasses.fields(cls):
            traits = LEAVES[field.name]
            cells = [f"`{field.name}`", type_of(field), quote(defaults[field.name]), traits.decides]
            parts.append(
                f"| {' | '.join(cells)} | "
                f"{traits.sentence.replace('|', ' or ').replace('<', '&lt;')} |\n"
            )
    parts.append(TAIL + defaults_by_version())
    return "".join(parts).replace("|  |", "| |")


def test_the_settings_page_is_up_to_date(check_generated):
    check_generated(PAGE, page())
