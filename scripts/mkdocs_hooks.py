"""Hooks of mkdocs (see mkdocs.yml), which build the site from the pages as GitHub shows them.

docs/README.md        its headings and links are the navigation
README.md             the first page
docs/glossary.md      its terms have tooltips on all pages, where a page first uses them
docs/api.md           the names in the tables get their documentation
pages outside docs/   are part of the site; other linked files and folders are pages of source text
"""

import json
import re
from functools import cache
from pathlib import Path
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
INDEX = "docs/README.md"
API = "docs/api.md"
GLOSSARY = "docs/glossary.md"
# Pages by their path in the repository whose path in the site differs.
MOVED = {"README.md": "index.md", INDEX: "all_pages.md"}
LINK = re.compile(r"(\]\(|(?:src|href)=\")([^)\s\"#]+)")
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
TOOLTIP = re.compile(r'<abbr title="(?P<meaning>[^"]*)">(?P<text>.*?)</abbr>')
OBJECT = re.compile(r"\[`(hyvideo[\w.]+)`\]\([^)]*\)")  # in a table of the API page
FLAG = re.compile(r"--\w+")
INTERVAL = re.compile(r"\[[+-]?[\d.]+, [+-]?[\d.]+\]")
WHOLE = r'<span class="whole">\g<0></span>'  # site.css
SOURCE = "source"  # folder of the site for source text
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".json": "json"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = [{"Home": MOVED["README.md"]}, *_navigation()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and a page for each source file or folder that pages link."""
    files.remove(files.get_file_from_path("README.md"))
    for page in [INDEX, *(path.name for path in ROOT.glob("*.md"))]:
        files.append(_page(config, _place(page), (ROOT / page).read_text(encoding="utf-8")))
    for path in sorted(_linked_sources()):
        files.append(_page(config, _place(path), _source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = _repository_path(page.file.src_uri)
    if source == API:
        markdown = _with_objects(markdown)
    markdown = _outside_code(markdown, lambda text: LINK.sub(_moved(source), text))
    if source != GLOSSARY and not page.file.src_uri.startswith(f"{SOURCE}/"):
        markdown += "\n\n" + "\n".join(f"*[{term}]: {text}" for term, text in _terms().items())
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the first tooltip of each term on the page, and none in headings and in words such as
    SAGE-GRPO. Flags and intervals stay on one line.
    """
    seen = set()

    def first(match: re.Match) -> str:
        if match["heading"]:
            return TOOLTIP.sub(r"\g<text>", match[0])
        if html[: match.start()].endswith("-"):
            return match["text"]
        is_new = match["meaning"] not in seen
        seen.add(match["meaning"])
        return match[0] if is_new else match["text"]

    html = re.sub(r"<code>[^<]*</code>", lambda code: FLAG.sub(WHOLE, code[0]), html)
    html = INTERVAL.sub(WHOLE, html)
    return re.sub(rf"(?P<heading><h\d.*?</h\d>)|{TOOLTIP.pattern}", first, html, flags=re.DOTALL)


def _navigation() -> list[dict]:
    """Return the headings of the index with the pages below each of them."""
    text = (ROOT / INDEX).read_text(encoding="utf-8")
    sections = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, rows = section.partition("\n")
        links = re.findall(r"\[([^\]]+)\]\(([^)#]+\.md)\)", rows)
        pages = [
            {name[0].upper() + name[1:]: _place(normpath(f"docs/{path}"))} for name, path in links
        ]
        sections.append({title.strip(): pages})
    sections[-1][next(iter(sections[-1]))].append({"All pages by question": MOVED[INDEX]})
    return sections


def _with_objects(text: str) -> str:
    """Return the API page with the documentation of each object below the table that names it."""
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    for number, section in enumerate(sections):
        objects = "\n\n".join(f"::: {name}" for name in OBJECT.findall(section))
        sections[number] = f"{OBJECT.sub(_to_object, section)}\n{objects}\n\n"
    return "".join(sections)


def _to_object(match: re.Match) -> str:
    """Return a link to the documentation of an object on the same page."""
    return f"[`{match[1].rpartition('.')[2]}`](#{match[1]})"


def _place(path: str) -> str:
    """Return the path in the site of a path in the repository."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".md") and "/" not in path:
        return path
    return f"{SOURCE}/{path}.md"


def _repository_path(place: str) -> str:
    """Return the path in the repository of a page of the site."""
    for path, moved in MOVED.items():
        if moved == place:
            return path
    if place.startswith(f"{SOURCE}/"):
        return place.removeprefix(f"{SOURCE}/").removesuffix(".md")
    return place if (ROOT / place).is_file() else f"docs/{place}"


def _moved(source: str):
    """Return the substitution that points a link of the page ``source`` to its target in the site."""

    def replaced(match: re.Match) -> str:
        if re.match(r"\w+:", match[2]):  # of another site
            return match[0]
        target = normpath(f"{source}/../{match[2]}")
        here = f"{_place(source)}/.."
        return match[1] + relpath(_place(target), normpath(here))

    return replaced


def _linked_sources() -> set[str]:
    """Return the files and folders outside docs/, other than pages, that pages link."""
    found = set()
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        source = page.relative_to(ROOT).as_posix()
        text = CODE.sub("", page.read_text(encoding="utf-8"))
        for _, link in LINK.findall(text):
            target = normpath(f"{source}/../{link}")
            is_page = target.endswith(".md") or target.startswith("docs/")
            if not is_page and (ROOT / target).exists():
                found.add(target)
    return found


def _source_page(path: str) -> str:
    """Return a page with the text of a file, or of the files of a folder."""
    place = ROOT / path
    if place.suffix == ".ipynb":
        return _notebook_page(place)
    names = [path]
    if place.is_dir():
        inside = [file for file in sorted(place.rglob("*")) if file.suffix in LANGUAGES]
        names = [file.relative_to(ROOT).as_posix() for file in inside]
    parts = [f"# {path}"]
    for name in names:
        language = LANGUAGES.get(Path(name).suffix, "text")
        text = (ROOT / name).read_text(encoding="utf-8")
        parts.append(f"## {name}\n\n````{language}\n{text}````")
    return "\n\n".join(parts)


def _notebook_page(path: Path) -> str:
    """Return the cells of a notebook with their outputs."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            shown = output.get("data", {})
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
            elif "text/html" in shown:
                parts.append("".join(shown["text/html"]))
            elif "image/png" in shown:
                parts.append(f"![plot](data:image/png;base64,{shown['image/png'].strip()})")
    return "\n\n".join(parts)


def _page(config: MkDocsConfig, place: str, text: str) -> File:
    return File.generated(config, place, content=text)


def _outside_code(text: str, change) -> str:
    """Apply a change to the text of a page that is not code."""
    parts = []
    end = 0
    for match in CODE.finditer(text):
        parts += [change(text[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, change(text[end:])])


@cache
def _terms() -> dict[str, str]:
    """Return the meaning of each term of the glossary, as plain text, also for its plural and in
    capitals.
    """
    rows = re.findall(
        r"^\| \*\*(.+?)\*\* \| (.+?) \|$",
        (ROOT / GLOSSARY).read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    terms = {}
    for term, meaning in rows:
        plain = re.sub(r" \(\[[^)]*\)\)$|`", "", meaning)
        plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", plain)
        for form in (term, f"{term}s", term[0].upper() + term[1:]):
            terms.setdefault(form, plain)
    return terms
