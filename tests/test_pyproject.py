"""pyproject.toml includes everything that an installed copy needs."""

import os
import subprocess
import sys
import tomllib
from fnmatch import fnmatch

import pytest

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


@pytest.mark.system
def test_an_installed_copy_is_one_package_that_trains_from_any_folder(tmp_path):
    """``pip install .``, then ``sage-grpo``; the packages that it needs are those of this Python."""
    files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    source, site = tmp_path / "source", tmp_path / "site"
    for name in subprocess.check_output(files, cwd=ROOT, text=True).split("\0"):
        if (ROOT / name).is_file() and not name.startswith(("docs/", "tests/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*pip, "--target", site, source], check=True)
    assert [
        path.name for path in site.iterdir() if path.name != "bin" and "-" not in path.name
    ] == ["hyvideo"]
    command = [sys.executable, site / "bin" / "sage-grpo"]
    environment = os.environ | {"PYTHONPATH": str(site)}

    def run(*words):
        subprocess.run([*command, *words], cwd=tmp_path, env=environment, check=True)

    short = ["--max_steps", "1", "--validation_steps", "1", "--num_threads", "1"]
    run("post_train", "--config", "configs/smoke.yaml", *short, "--output_dir", "run")
    run("report", "run")
    assert (tmp_path / "run" / "report.html").is_file()
