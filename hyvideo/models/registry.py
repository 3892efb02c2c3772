"""Packages of model families: those in ``hyvideo/models``, installed ones, and one that the setting
``family`` names.

A family is a package whose ``__init__`` has ``CLASS_NAMES``, the class names in config.json that
select it. docs/add_a_model.md lists its files. An installed package declares the entry point group
``hyvideo.families``:

    [project.entry-points."hyvideo.families"]
    mochi = "my_package.mochi"

Nothing here imports torch, unless there is a family from outside.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from hyvideo.data.custom_code import load_module
from hyvideo.data.text import quote
from hyvideo.models.versions import FAMILIES, VERSIONS_FILE, add_versions

GROUP = "hyvideo.families"  # of entry points
_HELP = "docs/add_a_model.md describes the files of a family"
_FOLDERS = {name: Path(__file__).parent / name for name in FAMILIES}
_MODULES = {name: f"hyvideo.models.{name}" for name in FAMILIES}


def register(location: str) -> None:
    """Make a family outside the repository known, from its folder or from its importable module.

    Its name is the last part of the location. An empty location and a family that is already known
    have no effect. Raises ValueError if the package cannot be used.
    """
    if not location:
        return
    is_folder = os.path.isdir(location)
    if is_folder:
        folder = Path(location).resolve()
        name = folder.name
    else:
        folder = _folder_of_module(location)
        name = location.rpartition(".")[2]
    if name in _FOLDERS:
        if _FOLDERS[name] == folder:
            return
        raise ValueError(
            f"family {quote(location)} has the name {name}, which the family in {_FOLDERS[name]} "
            "already has; rename the folder or the module"
        )
    if is_folder:
        _check_folder(folder)
    module = load_module(location, "family")
    class_names = getattr(module, "CLASS_NAMES", ())
    is_list = isinstance(class_names, tuple | list) and len(class_names) > 0
    if not is_list or not all(isinstance(each, str) for each in class_names):
        raise ValueError(
            f"family {quote(location)} must define CLASS_NAMES in its __init__.py, a tuple of the "
            f"class names in config.json that select it; {_HELP}"
        )
    for class_name in class_names:
        if class_name in packages():
            raise ValueError(
                f"family {quote(location)} has the class name {class_name}, which belongs to the "
                f"family {packages()[class_name]}; remove it from CLASS_NAMES"
            )
    add_versions(name, folder / VERSIONS_FILE)
    _FOLDERS[name] = folder
    _MODULES[name] = module.__name__
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
    """Import a module of a family's package, such as ``tiny``.

    Raises ValueError if the family is unknown or has no such module.
    """
    if family not in _MODULES:
        raise ValueError(
            f"a family must be one of {', '.join(_MODULES)}, got {quote(family)}; set family to "
            "the folder or module of another one"
        )
    name = f"{_MODULES[family]}.{part}"
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"the family in {_FOLDERS[family]} needs a file {part}.py; {_HELP}")
    return _import(name)


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
        f"{', '.join(sorted(packages()))}. Set family to the folder or module of a family that "
        "has it"
    )


def _folder_of_module(location: str) -> Path:
    try:
        spec = importlib.util.find_spec(location)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "family must be a folder with the package of a model family, or the name of an "
            f"importable package, got {quote(location)}; correct the path, or install the package"
        )
    return Path(spec.submodule_search_locations[0]).resolve()


def _check_folder(folder: Path) -> None:
    """Raise ValueError unless a folder is a package that can be imported by its name."""
    if not folder.name.isidentifier() or not (folder / "__init__.py").is_file():
        raise ValueError(
            "family must be a folder with an __init__.py and a name that Python can import, got "
            f"{quote(str(folder))}; {_HELP}"
        )
    known = sys.modules.get(folder.name)
    if known is not None and known.__file__ != str(folder / "__init__.py"):
        raise ValueError(
            f"family {quote(str(folder))} has the name of the module {folder.name}, which is "
            "already imported; rename the folder"
        )


def _import(name: str) -> ModuleType:
    """Import a module of a family; a built-in one without torch."""
    if name.startswith("hyvideo."):
        return importlib.import_module(name)
    return load_module(name, "family")


for _entry in importlib.metadata.entry_points(group=GROUP):
    register(_entry.value)
