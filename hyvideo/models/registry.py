"""Packages of model families: those in ``hyvideo/models``, and one in the folder that the setting
``family`` names.

A family is a package whose ``__init__`` has ``CLASS_NAMES``, the class names in config.json that
select it. docs/extend.md#add-a-model lists its files. Nothing here imports torch, unless there is a family
from outside.
"""

import functools
import importlib
from pathlib import Path
from types import ModuleType

from hyvideo.files.custom_code import load_module
from hyvideo.files.text import quote
from hyvideo.models.versions import FAMILIES, VERSIONS_FILE, add_versions

_HELP = "docs/extend.md#add-a-model describes the files of a family"
_FOLDERS = {name: Path(__file__).parent / name for name in FAMILIES}
_MODULES = {name: f"hyvideo.models.{name}" for name in FAMILIES}


def register(location: str) -> None:
    """Make the family in a folder outside the repository known; its name is that of the folder.

    An empty location and a family that is already known have no effect. Raises ValueError if the
    folder is no package, cannot be imported, or has a name or class of another family.
    """
    folder = Path(location).resolve()
    if not location or _FOLDERS.get(folder.name) == folder:
        return
    if not (folder / "__init__.py").is_file():
        raise ValueError(
            f"family must be a folder with an __init__.py, got {quote(location)}; {_HELP}"
        )
    module = load_module(str(folder), "family")
    for name in (folder.name, *module.CLASS_NAMES):
        if name in _FOLDERS or name in packages():
            raise ValueError(
                f"family {quote(location)} has the name {name}, which belongs to the family in "
                f"{_FOLDERS[packages().get(name, name)]}; rename the folder, or remove the class "
                "from CLASS_NAMES"
            )
    add_versions(folder.name, folder / VERSIONS_FILE)
    _FOLDERS[folder.name] = folder
    _MODULES[folder.name] = module.__name__
    packages.cache_clear()


@functools.cache
def packages() -> dict[str, str]:
    """Return the name of the family for each class name of a model."""
    return {
        class_name: name
        for name, module in _MODULES.items()
        for class_name in _import(module).CLASS_NAMES
    }


def module_of(family: str, part: str) -> ModuleType:
    """Import a module of a family's package, such as ``tiny``."""
    return _import(f"{_MODULES[family]}.{part}")


def folder_of(family: str) -> Path:
    """Return the folder of a family's package."""
    return _FOLDERS[family]


def package_name(family: str) -> str:
    """Return the full name of a family's package."""
    return _MODULES[family]


def is_built_in(family: str) -> bool:
    """Return whether a family belongs to this repository's packages, whose settings need no torch."""
    return _MODULES[family].startswith("hyvideo.")


def class_problem(class_name: str) -> str:
    """Return why no family can be chosen for the class name of a config.json."""
    return (
        f"no model family has the class {quote(class_name)}; the classes are "
        f"{', '.join(sorted(packages()))}. Set family to the folder of a family that has it"
    )


def _import(name: str) -> ModuleType:
    """Import a module of a family; a built-in one without torch."""
    if name.startswith("hyvideo."):
        return importlib.import_module(name)
    return load_module(name, "family")
