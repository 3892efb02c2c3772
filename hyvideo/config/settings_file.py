"""A run's YAML file as command-line flags, so that file and flags go through the same checks."""

import json
from collections.abc import Mapping
from pathlib import Path

from hyvideo.config.yaml_files import read_yaml
from hyvideo.data.outside import shown

_LISTS = ("report_to", "reward_model")


def flags_of_file(path: Path, types: Mapping[str, object]) -> list[str]:
    """The settings of a file as flags. ``types``: of every setting, by name.

    Raises: ValueError for a file that cannot be read, a name that is no setting, and a value of another type.
    """
    try:
        settings = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"--config {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"--config {path} must hold `name: value` lines, got {type(settings).__name__}")
    settings.pop("environment", None)  # of the config.yaml that a run leaves
    flags: list[str] = []
    for name, value in settings.items():
        if name not in types:
            raise ValueError(f"{path}: unknown setting {shown(name, 80)}; --help lists the settings")
        if problem := _type_problem(name, value, types[name]):
            raise ValueError(f"{path}: setting {name!r} {problem}")
        flags += _flag(name, value)
    return flags


def _type_problem(name: str, value: object, wanted: object) -> str | None:
    """Where YAML's type of a value cannot be the setting's, though its text may look so."""
    is_list, is_mapping = isinstance(value, list), isinstance(value, dict)
    if value is None or (is_list and name not in _LISTS) or (is_mapping and name != "reward_weights"):
        kind = "a list" if is_list else "a mapping" if is_mapping else "nothing"
        return f"takes one value, got {kind}; leave it out for its default"
    if isinstance(value, list):
        other = [one for one in value if not isinstance(one, str)]
        return f"takes a list of words, got {shown(other[0], 80)} in it; put it in quotes" if other else None
    if isinstance(value, bool) and wanted is not bool:
        said = str(value).lower()
        return f"got the truth value {said}, as YAML reads yes, no, on, off, true and false; put text in quotes"
    if isinstance(value, float) and wanted is int:
        return f"takes a whole number, got {value:g}; write its digits"
    return None


def _flag(name: str, value: object) -> list[str]:
    if name in _LISTS:
        return [f"--{name}", *([str(one) for one in value] if isinstance(value, list) else [str(value)])]
    return [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]
