"""Conversion of tensor and setting names between original checkpoints and diffusers, by a table of
the family.

A table (``<family>/names.yaml``) has these keys:

    placeholders   regular expressions by name; rows refer to them in braces
    <model>
      modules      names of modules; "leaves" is a regular expression for the rest of a tensor's name
      tensors      whole names of tensors
      settings     settings of config.json that differ only in name
      only_values  settings of the original for which only this value is supported
      defaults     settings that may be missing in the original's config.json, with their values
      omitted      settings that it lacks, with the value that is then assumed; written only if the value differs
      arguments    fixed arguments of diffusers' class
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the planner reads settings without torch
    from torch import Tensor

Rename = Callable[["Mapping[str, Tensor]"], "dict[str, Tensor]"]


def both_directions(table: Mapping[str, Any], model: str, kind: str) -> tuple[Rename, Rename]:
    """Return the functions that rename a model's tensors to diffusers' and to the original's;
    ``kind`` is its name.
    """
    rows = [
        (*row, rf"\.(?P<leaf>{table[model]['leaves']})", ".{leaf}")
        for row in table[model]["modules"].items()
    ]
    rows += [(*row, "", "") for row in table[model].get("tensors", {}).items()]
    placeholders = table["placeholders"]
    to_diffusers = [
        (_pattern(original, leaf, placeholders), new + end) for original, new, leaf, end in rows
    ]
    to_original = [
        (_pattern(new, leaf, placeholders), original + end) for original, new, leaf, end in rows
    ]
    return partial(_rename, to_diffusers, f"an original {kind}"), partial(
        _rename, to_original, f"a diffusers {kind}"
    )


def with_dots(table: Mapping[str, Any], model: str, flat: str) -> str | None:
    """Return the original's module whose name with underscores in place of dots is ``flat``, or
    None.
    """
    for name in table[model]["modules"]:
        match = _pattern(name.replace(".", "_"), "", table["placeholders"]).fullmatch(flat)
        if match:
            return name.format(**match.groupdict())
    return None


def _pattern(name: str, leaf: str, placeholders: Mapping[str, str]) -> re.Pattern[str]:
    pattern = re.escape(name)
    for placeholder, expression in placeholders.items():
        pattern = pattern.replace(
            re.escape(f"{{{placeholder}}}"), f"(?P<{placeholder}>{expression})"
        )
    return re.compile(pattern + leaf)


def _rename(
    renamings: list[tuple[re.Pattern[str], str]], kind: str, state_dict: "Mapping[str, Tensor]"
) -> "dict[str, Tensor]":
    """Return the tensors under new names: the template of the matching pattern, filled in with the
    matched groups.
    """
    renamed = {}
    for name, tensor in state_dict.items():
        for pattern, template in renamings:
            match = pattern.fullmatch(name)
            if match:
                renamed[template.format(**match.groupdict())] = tensor
                break
        else:
            raise ValueError(
                f"tensor {name!r} with shape {tuple(tensor.shape)} does not belong to {kind} "
                "checkpoint"
            )
    return renamed


def settings_to_diffusers(table: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the diffusers arguments that differ from the original's config only in name, and the
    fixed arguments.
    """
    for key, value in table.get("only_values", {}).items():
        if config.get(key, value) != value:
            raise ValueError(
                f"config key {key!r} must be {value!r}, the only supported value, got "
                f"{config[key]!r}"
            )
    config = table.get("omitted", {}) | table.get("defaults", {}) | dict(config)
    arguments = dict(table.get("arguments", {}))
    for key, name in table["settings"].items():
        value = config[key]
        arguments[name] = tuple(value) if isinstance(value, list) else value
    return arguments


def settings_to_original(
    table: Mapping[str, Any], config: Mapping[str, Any], others: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the original's config: the settings that differ from diffusers' only in name, and
    ``others``.
    """
    values = {}
    for key, name in table["settings"].items():
        value = config[name]
        values[key] = list(value) if isinstance(value, tuple) else value
    omitted = table.get("omitted", {}).items()
    return dict(pair for pair in (values | others).items() if pair not in omitted)
