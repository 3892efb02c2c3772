"""Every program answers --help."""

import importlib
import subprocess
import sys

import pytest

from tests.forked import ROOT

PROGRAMS = [
    "generate",
    "post_train",
    *(
        f"{path.parent.name}.{path.stem}"
        for folder in ("scripts", "examples")
        for path in sorted((ROOT / folder).glob("*.py"))
        if "def main(" in path.read_text(encoding="utf-8")
    ),
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_answers_help(name, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert not ended.value.code
    assert "usage" in capsys.readouterr().out


def test_a_script_may_be_started_as_a_file(tmp_path):
    """``python scripts/report.py``, as people type it, from any folder."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "report.py", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr


@pytest.mark.parametrize("program", ["post_train.py", "generate.py", "scripts/report.py"])
def test_a_python_without_packages_is_one_sentence(program):
    """Without ``source .venv/bin/activate``."""
    done = subprocess.run(
        [sys.executable, "-S", ROOT / program, "--help"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "activate" in done.stderr
    assert len(done.stderr.splitlines()) == 1
