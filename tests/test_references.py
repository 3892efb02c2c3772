"""References in docstrings and comments can be opened: pages, files, modules and sections of
papers.
"""

import ast
import re
from itertools import chain

from tests.forked import ROOT
from tests.test_docs import TEXTS, anchors

FOLDERS = ("hyvideo", "studies", "scripts", "examples")
SOURCES = sorted(
    {
        ROOT / "generate.py",
        ROOT / "post_train.py",
        *chain(*((ROOT / folder).rglob("*.py") for folder in FOLDERS)),
    }
)
PAGE = re.compile(r"(?<![\w/<>*])((?:[\w-]+/)*[\w-]+\.md)(?:#([\w-]+))?")
FILE = re.compile(r"(?<![\w./<>*-])((?:[\w-]+/)+[\w.-]+\.(?:py|sh|yaml|csv|jinja|html|sbatch))\b")
MODULE = re.compile(r"\b((?:hyvideo|studies|scripts|examples|tests)(?:\.\w+)+)(?!\w|\*)")
SECTION = re.compile(r"\b(?:Section|Equation|Appendix) [\dA-Z]")
EXAMPLES = ("outputs/", "ckpts/", "my_", "a/", "x/")  # files of users


def prose_of(text):
    """Yield the docstrings and comments of a file, and the pages of docs/ that its strings name."""
    nodes = [ast.parse(text)]
    while nodes:
        node = nodes.pop()
        yield ast.get_docstring(node) or ""
        nodes += [child for child in node.body if isinstance(child, ast.ClassDef | ast.FunctionDef)]
    yield from re.findall(r"(?:^|\s)# .*", text)
    yield from re.findall(r"\bdocs/\w+\.md(?:#[\w-]+)?", text)


def is_module(name):
    """Return whether ``a.b.c`` is a module, or a name in one."""
    parts = name.split(".")
    if ROOT.joinpath(*parts).is_dir() or ROOT.joinpath(*parts).with_suffix(".py").is_file():
        return True
    module = ROOT.joinpath(*parts[:-1]).with_suffix(".py")
    return module.is_file() and parts[-1] in module.read_text(encoding="utf-8")


def dead_references(text, source):
    """Return the references of a text that cannot be opened.

    Pages that a program writes are named in docs/.
    """
    dead = []
    for page, anchor in PAGE.findall(text):
        found = [name for name in (page, f"docs/{page}") if name in TEXTS]
        is_output = "docs/" not in page and any(f"`{page}`" in other for other in TEXTS.values())
        if (
            not found
            and not is_output
            and not (ROOT / page).is_file()  # of an example
            or (found and anchor and anchor not in anchors(TEXTS[found[0]]))
        ):
            dead.append(page)
    for path in FILE.findall(text.replace("...", "*")):
        folders = (ROOT, ROOT / "hyvideo", source.parent, ROOT / "tests")
        if not path.startswith(EXAMPLES) and not any(
            (folder / path).exists() for folder in folders
        ):
            dead.append(path)
    dead += [name for name in MODULE.findall(text) if not is_module(name)]
    return dead + [name for name in SECTION.findall(text) if "arXiv:" not in text]


def test_references_in_docstrings_and_comments_can_be_opened():
    dead = [
        f"{source.relative_to(ROOT)}: {name}"
        for source in SOURCES
        for text in prose_of(source.read_text(encoding="utf-8"))
        for name in dead_references(text, source)
    ]
    assert not dead
