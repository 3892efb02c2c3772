"""The computed tables of docs/sde.md."""

import itertools
import re
from pathlib import Path

from examples.sampler_tables import search, search_report, tables_report
from tests.evaluation.samplers.marginals import marginals_report

PAGE = Path(__file__).parents[3] / "docs" / "sde.md"
TABLE = re.compile(r"^\|.*\n(?:\|.*\n)+", re.MULTILINE)
STDS, REGIMES, MARGINALS, SEARCH, MATCHES = 1, 3, 4, 5, 6  # the other tables are written by hand
STEPS = (1, 2, 3, 5, 10, 15, 18, 19, 20)  # shown on the page


def tables_of(report: str) -> list[str]:
    return [part + "\n" for part in report.split("\n\n") if part.startswith("|")]


def fast_tables() -> dict[int, str]:
    """Return tables by their index on the page."""
    stds, matches, _norms, _factors, regimes = tables_of(tables_report(20, 5.0, 0.5, "stochastic"))
    head, ruler, *rows = stds.splitlines(keepends=True)
    stds = "".join([head, ruler, *(rows[step - 1] for step in STEPS)])
    return {STDS: stds, REGIMES: regimes, MATCHES: matches}


def slow_tables() -> dict[int, str]:
    """Return the tables that take a minute, by their index on the page."""
    marginals, _on_schedules = tables_of(marginals_report(5.0, 0.5))
    head, ruler, *rows = tables_of(search_report(search()))[0].splitlines(keepends=True)
    shown = [row for row in rows if "5" in row.split("|")[2].replace(",", " ").split()]
    return {MARGINALS: marginals, SEARCH: "".join([head, ruler, *shown])}


def page_with(tables: dict[int, str]) -> str:
    """Return the page with the given tables, by index, in place of the current ones."""
    number = itertools.count()
    return TABLE.sub(lambda found: tables.get(next(number), found[0]), PAGE.read_text(encoding="utf-8"))
