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
    comfyui        as a model, with ComfyUI's names of modules
    lora
      modules      further names of modules in LoRA files
      optional     modules, by diffusers' names, that only some of the family's transformers have; * is any rest
      foreign      modules of related models in LoRA files, which this family's models do not have
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Found(NamedTuple):
    """A parameter that a name in a LoRA file ends with."""

    parameter: str  # in diffusers' names, or in another layout's
    before: str  # what stands before it in the name
    is_diffusers: bool
    is_foreign: bool  # of another model: this family's transformers lack it


class LoraNames:
    """Names of a family's parameters in LoRA files of all programs.

    ``table`` has the parameters of the ``transformer`` and further modules in ``comfyui`` and
    ``lora``; a module that is renamed to itself is one of diffusers. ``to_diffusers`` renames the
    parameters of all other layouts.
    """

    def __init__(self, table: Mapping[str, Any], to_diffusers: Rename) -> None:
        self.to_diffusers = to_diffusers
        transformer, lora = table["transformer"], table.get("lora", {})
        leaf = f"(?P<leaf>{transformer['leaves']})"
        others = table.get("comfyui", {}).get("modules", {}) | lora.get("modules", {})
        rows: list[tuple[str, str, bool, bool]] = []  # name, rest, is_diffusers, is_foreign
        for original, diffusers in transformer["modules"].items():
            rows += [(diffusers, leaf, True, False), (original, leaf, False, False)]
        for original, diffusers in transformer.get("tensors", {}).items():
            rows += [(diffusers, "", True, False), (original, "", False, False)]
        for name, diffusers in others.items():
            rows.append((name, leaf, name == diffusers, False))
        for name, diffusers in lora.get("foreign", {}).items():
            rows += [(diffusers, leaf, True, True), (name, leaf, False, True)]
        self._rows = [
            (
                name + (".{leaf}" if rest else ""),
                self._pattern(name, rest, table["placeholders"], r"\."),
                self._pattern(name.replace(".", "_"), rest, table["placeholders"], "_"),
                is_diffusers,
                is_foreign,
            )
            for name, rest, is_diffusers, is_foreign in rows
        ]
        self._optional = [
            re.compile(_pattern(name, "", table["placeholders"]).pattern.replace(r"\*", ".*"))
            for name in lora.get("optional", [])
        ]

    def is_optional(self, module: str) -> bool:
        """Return whether only some of the family's transformers have a module of this name."""
        return any(pattern.fullmatch(module) for pattern in self._optional)

    @staticmethod
    def _pattern(
        name: str, rest: str, placeholders: Mapping[str, str], separator: str
    ) -> re.Pattern[str]:
        end = separator + rest if rest else ""
        return re.compile(
            rf"(?P<before>(?:.*{separator})?)" + _pattern(name, end, placeholders).pattern
        )

    def has(self, parameter: str) -> bool:
        """Return whether a parameter has this name in diffusers."""
        found = self.find(parameter, is_flat=False)
        return found is not None and found.is_diffusers and not found.before

    def find(self, name: str, *, is_flat: bool) -> Found | None:
        """Return the longest parameter that a name ends with, or None.

        ``is_flat`` are names with underscores in place of dots.
        """
        found = []
        for template, dotted, flat, is_diffusers, is_foreign in self._rows:
            match = (flat if is_flat else dotted).fullmatch(name)
            if match:
                groups = match.groupdict()
                before = groups.pop("before")
                found.append(Found(template.format(**groups), before, is_diffusers, is_foreign))
        return min(found, key=lambda each: len(each.before), default=None)


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
