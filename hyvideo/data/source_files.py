"""Files of a user's Python code: a file, and the files of the user's modules that it imports."""

import ast
import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from hyvideo.data.files import ROOT

# folders of the standard library and of hyvideo
_NOT_OF_USER = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        ROOT / "hyvideo",
    )
)


def with_imports(file: Path, module: str = "") -> list[Path]:
    """Return a Python file and the files that it imports, directly or not, each once.

    ``module`` is the name by which the file is imported; its packages are included. Nothing is
    imported: the names in import statements are looked up in ``sys.path`` and in the folder of the
    file that has them. The standard library, installed packages and hyvideo are left out.
    """
    found = {os.path.realpath(file): file}
    left = [(module, file), *_files_of(module, file.parent)]
    while left:
        name, path = left.pop()
        found.setdefault(os.path.realpath(path), path)
        for imported in _imported_names(path, name):
            left += [
                (part, each)
                for part, each in _files_of(imported, path.parent)
                if os.path.realpath(each) not in found
            ]
    first, *others = found.values()
    return [first, *sorted(others)]


def _imported_names(file: Path, module: str) -> Iterator[str]:
    """Yield the full names in the import statements of a file."""
    if not file.is_file():  # reading a pipe would never end
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # the import of the file reports it
    is_package = file.name == "__init__.py"
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _files_of(module: str, beside: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and file of ``a``, ``a.b`` and ``a.b.c`` for the user's module ``a.b.c``, as far
    as they are files.
    """
    folders = [*(path or os.getcwd() for path in sys.path), str(beside)]
    name = ""
    for part in filter(None, module.split(".")):
        is_first = not name
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            return
        folders = list(spec.submodule_search_locations or [])
        if is_first:
            place = Path(folders[0]) if folders else Path(spec.origin)
            if _is_installed(place.parent) or _is_not_of_user(place):
                return
        if spec.origin and spec.origin.endswith(".py") and not _is_not_of_user(Path(spec.origin)):
            yield name, Path(spec.origin)


@functools.cache
def _is_installed(folder: Path) -> bool:
    """Return whether a package manager has installed packages into a folder."""
    return next(folder.glob("*.dist-info"), None) is not None


def _is_not_of_user(path: Path) -> bool:
    return f"{os.path.realpath(path)}{os.sep}".startswith(_NOT_OF_USER)
