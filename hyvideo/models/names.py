"""Names of tensors and settings in original checkpoints, mapped to diffusers' and back by the table of a family.

A table (``<family>/names.yaml``) has these keys:

    placeholders   regular expressions that stand in braces on both sides of a row
    <model>
      modules      names of modules; "leaves" may follow them
      tensors      whole names of tensors
      settings     of config.json that only have other names, by kind
"""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the planner reads settings without torch
    from torch import Tensor

# Patterns of names and what becomes of them: a template, filled in with the match's groups.
Renamings = list[tuple[re.Pattern[str], str]]

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


def both_directions(table: Mapping[str, Any], model: str) -> tuple[Renamings, Renamings]:
    """Return the renamings of a model's tensors to diffusers and to the original."""
    rows = [(*row, rf"\.(?P<leaf>{table[model]['leaves']})", ".{leaf}") for row in table[model]["modules"].items()]
    rows += [(*row, "", "") for row in table[model].get("tensors", {}).items()]
    placeholders = table["placeholders"]
    return (
        [(_pattern(original, leaf, placeholders), ours + end) for original, ours, leaf, end in rows],
        [(_pattern(ours, leaf, placeholders), original + end) for original, ours, leaf, end in rows],
    )


def _pattern(name: str, leaf: str, placeholders: Mapping[str, str]) -> re.Pattern[str]:
    pattern = re.escape(name)
    for placeholder, expression in placeholders.items():
        pattern = pattern.replace(re.escape(f"{{{placeholder}}}"), f"(?P<{placeholder}>{expression})")
    return re.compile(pattern + leaf)


def rename(state_dict: "Mapping[str, Tensor]", renamings: Renamings, kind: str) -> "dict[str, Tensor]":
    """Return the tensors under their new names. Raises ValueError for a name that no row knows."""
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


def settings_to_diffusers(settings: Mapping[str, Mapping[str, str]], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return diffusers' arguments that only have other names in the original's config."""
    return {name: setting(config, key, kind) for kind in settings for key, name in settings[kind].items()}


def settings_to_original(settings: Mapping[str, Mapping[str, str]], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the original's settings that only have other names in diffusers' config."""
    values = {key: config[name] for keys in settings.values() for key, name in keys.items()}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
