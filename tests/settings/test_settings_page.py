"""docs/settings.md is generated from the traits of the settings."""

from typing import Literal, get_args, get_origin

from hyvideo.models.versions import ANNOUNCED, RELEASED
from hyvideo.settings.config import LEAVES, OBJECTIVE, SECTIONS, Config
from hyvideo.settings.objectives import BUILT_IN
from hyvideo.settings.sections import NoiseScale, Switch, leaves_of
from tests.forked import ROOT

PAGE = ROOT / "docs/settings.md"
HEAD = """# Settings

All settings of `post_train.py`. Each is a flag and a line of the YAML file for `--config`; flags override the file.
`--print_config` prints the resolved settings of a run and warns of settings that look as if they had an effect in it,
but have none. Flags of the public reference may have another name here
([list](coming_from_other_code.md#flags-of-the-public-reference)).

Each objective has only the settings that it reads; the sections [objective grpo](#objective-grpo) to
[objective distill](#objective-distill) list them. A setting of another objective is an error. If a flag chooses
another objective than the file, the settings of the file that it does not have are dropped with a note. The
[model version](#defaults-by-version) sets some defaults.

Editors complete and check a YAML file whose first line names `configs/settings.schema.json`, as that of each file in
`configs` does. `python -m scripts.settings_schema` writes the schema, and
`python -m pytest tests/settings/test_settings_page.py --regenerate` this page, from `hyvideo/settings/sections.py` and
`objectives.py`.

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


LIMITS = {"gt": "above", "ge": "at least", "le": "at most", "lt": "below"}


def type_of(leaf):
    """Return the type of a setting, and its range if it is more than "not negative"."""
    kind = leaf.kind
    if kind is Switch or get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if leaf.is_list:
        return "list of numbers" if leaf.element is float else "list of text"
    if get_origin(kind) is dict:
        return "JSON"
    if kind == NoiseScale:
        return "number, at most 1000, or `SAMPLER:ETA`"
    words = [{bool: "bool", int: "integer", float: "number", str: "text"}[kind]]
    for limit, word in LIMITS.items():
        values = [getattr(each, limit) for each in leaf.field.metadata if hasattr(each, limit)]
        words += [f"{word} {value:g}" for value in values if (limit, value) != ("ge", 0)]
    return ", ".join(words)


def quote(value):
    words = value
    if isinstance(value, list):
        words = " ".join(map(str, value))
    elif isinstance(value, bool):
        words = str(value).lower()
    return "" if words in ("", None, {}) else f"`{words}`"


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


def table(title, leaves):
    rows = [
        f"\n## {title}\n| setting | type | default | affects | description |\n|---|---|---|---|---|\n"
    ]
    for leaf in leaves:
        sentence = leaf.sentence.replace("|", " or ").replace("<", "&lt;")
        cells = [f"`{leaf.name}`", type_of(leaf), quote(leaf.default), leaf.decides, sentence]
        rows.append(f"| {' | '.join(cells)} |\n")
    return "".join(rows)


def page():
    parts = [HEAD]
    for section in Config.model_fields:
        if section != OBJECTIVE:
            parts.append(table(section, leaves_of(SECTIONS[section]).values()))
            continue
        parts.append(table(section, [LEAVES[OBJECTIVE]]))
        for name, cls in BUILT_IN.items():
            parts.append(table(f"objective {name}", leaves_of(cls).values()))
    parts.append(TAIL + defaults_by_version())
    return "".join(parts).replace("|  |", "| |")


def test_the_settings_page_is_up_to_date(check_generated):
    check_generated(PAGE, page())
