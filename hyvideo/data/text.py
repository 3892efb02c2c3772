"""Text for people: rows of a label and a text, which one printer aligns, and the forms of numbers in them."""

from collections.abc import Iterable

Row = tuple[str, str]  # label and text; an empty label continues the row above

LABEL_WIDTH = 23


def lines_of(rows: Iterable[Row], width: int = LABEL_WIDTH) -> list[str]:
    """Return a line for each row, with the texts aligned."""
    return [f"{label:<{width}}{text}" for label, text in rows]


def labelled(label: str, texts: Iterable[str]) -> list[Row]:
    """Return a row for each text, with the label at the first one only."""
    return [("" if number else label, text) for number, text in enumerate(texts)]


def number(value: float) -> str:
    """Format a number with three significant digits, or as a whole number from 100 on; also a template filter."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless the count is 1: ``1,200 videos``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
