"""Hooks of mkdocs.yml: pages have their paths in the repository, so that links between them work as on
GitHub, and terms of the glossary have tooltips.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Pages, and files that pages link.
SHOWN = ["*.md", "LICENSE", "CITATION.cff", "Dockerfile", "docs/**/*.*", "hyvideo/**/*.py"]
SHOWN += ["examples/**/*.py", "examples/*.ipynb", "tests/models/*.py"]
TERM = re.compile(r"^\| \*\*(.+?)\*\* \| (.+?) \|$", re.MULTILINE)  # of the glossary


def on_files(files: Files, config: MkDocsConfig) -> Files:
    paths = [path for pattern in SHOWN for path in sorted(ROOT.glob(pattern))]
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    shown = [File(name, str(ROOT), config.site_dir, use_directory_urls=False) for name in names]
    return Files([*of_theme, *shown])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "docs/glossary.md":
        return markdown
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    for term, meaning in TERM.findall(text):
        plain = re.sub(r"\[(.*?)\]\(.*?\)|`", r"\1", meaning)
        for form in (term, f"{term}s", term[0].upper() + term[1:]):
            markdown += f"\n\n*[{form}]: {plain}"
    return markdown
