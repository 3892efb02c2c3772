"""pyproject.toml includes everything that an installed copy needs."""

import tomllib
from fnmatch import fnmatch

from tests.forked import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_file_is_installed():
    patterns = ["*.py", "*.pyc", *PROJECT["tool"]["setuptools"]["package-data"]["*"]]
    files = [path for path in (ROOT / "hyvideo").rglob("*") if path.is_file()]
    assert len(files) > 150
    assert not [
        path for path in files if not any(fnmatch(path.name, pattern) for pattern in patterns)
    ]
    assert not [
        path.parent
        for path in files
        if not (path.parent / "__init__.py").exists()
        if path.suffix == ".py"
    ]
