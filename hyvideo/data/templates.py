"""Texts of Jinja's templates, which lie beside the code that fills them in."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def number(value: float) -> str:
    """Three digits, or all of them before the point; in a template the filter of this name."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def fill(template: Path, **values: object) -> str:
    """The text of a template, without a newline at its end. Lines that are a statement alone leave none.

    Values are escaped in HTML alone, JSON keeps the order of its names, and a name that is not given is an error.
    """
    pages = Environment(loader=FileSystemLoader(template.parent), undefined=StrictUndefined)
    pages.autoescape = ".html" in template.name
    pages.trim_blocks = pages.lstrip_blocks = True
    pages.filters["number"], pages.policies["json.dumps_kwargs"] = number, {}
    return pages.get_template(template.name).render(values).rstrip("\n")
