"""Plots of the page, made from the table of metrics."""

import re
from collections.abc import Iterable

from hyvideo.records.metric_table import METRICS, PLOTS, Found, Metric, Plot, find

BY_STEP = "by_step/"  # lists with one value per denoising step
_OF_VALIDATIONS = "validation/"  # drawn from the files of the validations


def plots_of(names: Iterable[str]) -> list[dict]:
    """Return the plots of the metrics that runs have, as curves.js draws them.

    A metric without a plot in the table, and one without a row, has a plot of its own among the
    other metrics.
    """
    known: dict[str, list[Found]] = {plot.title: [] for plot in PLOTS}
    own = []
    for name in dict.fromkeys(names):
        found = find(name)
        if name.startswith(_OF_VALIDATIONS):
            continue
        if found is None:
            own.append(_own_plot(name))
        elif found.metric.plot == "":
            own.append(_own_plot(name, found.metric))
        elif found.metric.plot:
            known[found.metric.plot].append(found)
    drawn = [_plot(plot, known[plot.title]) for plot in PLOTS if known[plot.title]]
    return drawn + own


def _plot(plot: Plot, found: list[Found]) -> dict:
    """Return a plot of the table with its metrics, in the order of their rows."""
    found = sorted(found, key=lambda each: METRICS.index(each.metric))
    return {
        "section": plot.section,
        "title": plot.title,
        "note": plot.note,
        "unit": found[0].metric.unit,
        "lines": [[each.name, each.label] for each in found],
        "kind": plot.kind,
        "center": plot.center,
        "fromZero": plot.from_zero,
        "isLog": plot.is_log,
        "onlyPositive": plot.only_positive,
        "onlyOneRun": plot.only_one_run,
    }


def _own_plot(name: str, metric: Metric | None = None) -> dict:
    """Return the plot of one metric, whose row is None if the table does not have it."""
    is_map = name.startswith(BY_STEP)
    return {
        "section": "steps" if is_map else "others",
        "title": name,
        "note": _without_markup(metric.meaning) if metric else "",
        "unit": metric.unit if metric else "",
        "lines": [[name, name]],
        "kind": "map" if is_map else "lines",
    }


def _without_markup(markdown: str) -> str:
    """Return a sentence of the table without its links and code marks."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", markdown).replace("`", "")
