"""Files of a user's code."""

import os

import pytest

from hyvideo.data.source_files import with_imports


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A package `mine_x` with the modules a, b and c, and a module beside it."""
    package = tmp_path / "mine_x"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(
        "import torch, os\nfrom hyvideo.data import files\nfrom . import b"
    )
    (package / "b.py").write_text("def f():\n    from mine_x.c import value\nfrom . import a")
    (package / "c.py").write_text("value = 1")
    (package / "unused.py").write_text("")
    (tmp_path / "beside.py").write_text("import mine_x.c as other")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def names(found, folder):
    return [str(path.relative_to(folder)) for path in found]


def test_a_module_has_the_modules_that_it_imports_and_its_packages(folder):
    found = with_imports(folder / "mine_x" / "a.py", "mine_x.a")
    assert names(found, folder) == [f"mine_x/{name}.py" for name in ("a", "__init__", "b", "c")]


def test_a_file_has_the_modules_beside_it(folder, monkeypatch):
    file = folder / "file.py"
    file.write_text("import sys\nsys.path.insert(0, '.')\nimport beside\nimport nowhere.x\n")
    monkeypatch.undo()  # the folder is not in sys.path
    found = with_imports(file)
    expected = ["file.py", "beside.py", "mine_x/__init__.py", "mine_x/c.py"]
    assert names(found, folder) == expected


def test_installed_packages_are_left_out(folder, monkeypatch):
    (folder / "mine_x-1.0.dist-info").mkdir()
    (folder / "file.py").write_text("import mine_x.c")
    assert names(with_imports(folder / "file.py"), folder) == ["file.py"]


@pytest.mark.parametrize("text", ["def (", "\0", "x = " + "-" * 100_000 + "1", None])
def test_a_file_that_cannot_be_parsed_is_returned(tmp_path, text):
    if text is not None:
        (tmp_path / "file.py").write_text(text)
    assert with_imports(tmp_path / "file.py") == [tmp_path / "file.py"]


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    assert with_imports(tmp_path / "pipe.py") == [tmp_path / "pipe.py"]
