"""Rendering of Jinja templates, which are stored next to the code that uses them."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def number(value: float) -> str:
    """Format a number with three significant digits, or as a whole number from 100 on; also a template filter."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def fill(template: Path, **values: object) -> str:
    """Render a template, without a trailing newline. Escapes values only in HTML; an undefined name raises an error."""
    pages = Environment(loader=FileSystemLoader(template.parent), undefined=StrictUndefined)
    pages.autoescape = ".html" in template.name
    pages.trim_blocks = pages.lstrip_blocks = True
    pages.filters["number"], pages.policies["json.dumps_kwargs"] = number, {}
    return pages.get_template(template.name).render(values).rstrip("\n")
