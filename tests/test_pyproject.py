"""pyproject.toml includes everything that an installed copy needs."""

import re
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


def test_requirements_are_pinned_once_and_test_requirements_are_separate():
    dynamic = PROJECT["tool"]["setuptools"]["dynamic"]
    names = []
    for file in (
        *dynamic["dependencies"]["file"],
        *dynamic["optional-dependencies"]["dev"]["file"],
    ):
        lines = [
            line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")
        ]
        assert all(re.fullmatch(r"[\w.-]+[=<>~][^ ]+", line) for line in lines)
        names += [re.split("[=<>~]", line)[0] for line in lines]
    assert len(names) == len({*names}) and {"torch", "pytest"} <= {*names}
    assert "pytest" not in (ROOT / "requirements.txt").read_text()
