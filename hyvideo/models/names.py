"""Names of tensors and settings in original checkpoints, mapped to diffusers' and back by the table of a family.

A table (``<family>/names.yaml``) has these keys:

    placeholders   regular expressions that stand in braces on both sides of a row
    <model>
      modules      names of modules; "leaves" may follow them
      tensors      whole names of tensors
      settings     of config.json that only have other names, by kind
      only_values  settings of the original that have no other value here
      defaults     of settings that the original's config.json may lack
      left_out     those that it never has; another value is written and read
      arguments    of diffusers' class for all models
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the planner reads settings without torch
    from torch import Tensor

Rename = Callable[["Mapping[str, Tensor]"], "dict[str, Tensor]"]

# Kinds of settings in the tables: what they must be, whether a value is, and the type of diffusers' argument.
_KINDS: dict[str, tuple[str, Callable[[Any], bool], type]] = {
    "integers": ("an integer of at least 1", lambda value: type(value) is int and value > 0, int),
    "counts": ("an integer of at least 0", lambda value: type(value) is int and value >= 0, int),
    "numbers": ("a positive number", lambda value: type(value) in (int, float) and value > 0, float),
    "flags": ("true or false", lambda value: type(value) is bool, bool),
    "lists": (
        "a list of positive integers",
        lambda value: isinstance(value, (list, tuple)) and value and all(type(n) is int and n > 0 for n in value),
        tuple,
    ),
}


def both_directions(table: Mapping[str, Any], model: str, kind: str) -> tuple[Rename, Rename]:
    """Return functions that give a model's tensors diffusers' names and the original's.

    They raise ValueError, which names the ``kind`` of model, for a tensor that no row knows.
    """
    rows = [(*row, rf"\.(?P<leaf>{table[model]['leaves']})", ".{leaf}") for row in table[model]["modules"].items()]
    rows += [(*row, "", "") for row in table[model].get("tensors", {}).items()]
    placeholders = table["placeholders"]
    to_diffusers = [(_pattern(original, leaf, placeholders), ours + end) for original, ours, leaf, end in rows]
    to_original = [(_pattern(ours, leaf, placeholders), original + end) for original, ours, leaf, end in rows]
    return partial(_rename, to_diffusers, f"an original {kind}"), partial(_rename, to_original, f"a diffusers {kind}")


def _pattern(name: str, leaf: str, placeholders: Mapping[str, str]) -> re.Pattern[str]:
    pattern = re.escape(name)
    for placeholder, expression in placeholders.items():
        pattern = pattern.replace(re.escape(f"{{{placeholder}}}"), f"(?P<{placeholder}>{expression})")
    return re.compile(pattern + leaf)


def _rename(
    renamings: list[tuple[re.Pattern[str], str]], kind: str, state_dict: "Mapping[str, Tensor]"
) -> "dict[str, Tensor]":
    """Return tensors under new names: each pattern has a template, filled in with the match's groups."""
    renamed = {}
    for name, tensor in state_dict.items():
        matches = ((pattern.fullmatch(name), template) for pattern, template in renamings)
        new_name = next((template.format(**match.groupdict()) for match, template in matches if match), None)
        if new_name is None:
            raise ValueError(f"tensor {name!r} with shape {tuple(tensor.shape)} is no tensor of {kind} checkpoint")
        renamed[new_name] = tensor
    return renamed


def setting(config: Mapping[str, Any], key: str, kind: str) -> Any:
    """Return a setting of the original as diffusers' class takes it. Raises ValueError for one of another kind."""
    rule, is_right, to_type = _KINDS[kind]
    if not is_right(config.get(key)):
        raise ValueError(f"config key {key!r} must be {rule}, got {config.get(key)!r}")
    return to_type(config[key])


def settings_to_diffusers(table: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return diffusers' arguments for the original's config that only have other names, and those of all models.

    Raises ValueError for a setting of another kind, or with another value than the only supported one.
    """
    for key, value in table.get("only_values", {}).items():
        if config.get(key, value) != value:
            raise ValueError(f"config key {key!r} must be {value!r}, got {config[key]!r}: no other is supported")
    config = table.get("left_out", {}) | table.get("defaults", {}) | dict(config)
    names = [(kind, key, name) for kind, keys in table["settings"].items() for key, name in keys.items()]
    return table.get("arguments", {}) | {name: setting(config, key, kind) for kind, key, name in names}


def settings_to_original(
    table: Mapping[str, Any], config: Mapping[str, Any], others: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the original's config: settings that only have other names in diffusers' config, and ``others``."""
    values = {key: config[name] for keys in table["settings"].values() for key, name in keys.items()}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    left_out = table.get("left_out", {}).items()
    return dict(pair for pair in (values | others).items() if pair not in left_out)
