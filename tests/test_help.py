"""Every program answers --help."""

import importlib
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
