"""Rendering of Jinja templates, which are stored next to the code that uses them."""

import functools
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hyvideo.files.text import number


def fill(template: Path, **values: object) -> str:
    """Render a template, without a trailing newline.

    Escapes values only in HTML; an undefined name raises an error.
    """
    return (
        _pages(template.parent, ".html" in template.name)
        .get_template(template.name)
        .render(values)
        .rstrip("\n")
    )


@functools.cache
def _pages(folder: Path, has_html: bool) -> Environment:  # keeps compiled templates
    pages = Environment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined, autoescape=has_html
    )
    pages.trim_blocks = pages.lstrip_blocks = True
    pages.filters["number"] = number
    pages.policies["json.dumps_kwargs"] = {}
    return pages
