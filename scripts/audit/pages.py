"""Numbers of report.html, from the files of its run."""

import json
import math
import re
from collections import defaultdict
from statistics import fmean, stdev

from scripts.audit.run import Run
from scripts.audit.statements import Audit, CannotCheck

TOPIC = "Report"
CURVES = 500  # iterations up to which a curve of the report has each


def audit_report(run: Run, audit: Audit) -> None:
    file = run.folder / "report.html"
    text = "curves and gain of the report are those of the files"
    with audit.compare(TOPIC, text, "report.html, metrics.jsonl, samples/", 1e-4) as rows:
        if not file.is_file():
            raise CannotCheck("the run has no report.html")
        data = re.search(
            r'<script type="application/json" id="data">(.*?)</script>', file.read_text(), re.DOTALL
        )
        (shown,) = json.loads(data[1])["runs"].values()
        lines = [line for line in run.metrics if line["iteration"] > 0]
        # the report of a run that goes on is that of its last validation
        rows.equal("iterations", True, shown["iterations"] <= len(lines))
        if len(lines) <= CURVES:
            for name, points in shown["metrics"].items():
                for line, point in zip(lines, points):
                    value = line.get(name)
                    if isinstance(value, int | float):
                        where = f"{name} of iteration {line['iteration']}"
                        scale = max(abs(value), 1e-12)
                        rows.number(where, value / scale, None if point is None else point / scale)
        expected = gain(run)
        if expected and shown["gain"]:
            mean, half = expected
            rows.number("gain of the reward", mean, shown["gain"]["mean"])
            if half is not None:
                rows.number(
                    "interval of the gain", half, shown["gain"]["mean"] - shown["gain"]["low"]
                )


def gain(run: Run) -> tuple[float, float | None] | None:
    """Return the mean gain of the validation reward over the prompts, and half of its 95 %
    interval by Student's t; None without two validations.
    """
    from scipy.stats import t

    validations = run.validations
    if 0 not in validations or max(validations) == 0:
        return None
    before = {entry["number"]: entry for entry in validations[0]}
    by_prompt = defaultdict(list)
    for entry in validations[max(validations)]:
        first = before[entry["number"]]["reward"]
        if None not in (first, entry["reward"]):
            by_prompt[entry["group"]].append(entry["reward"] - first)
    means = [fmean(values) for values in by_prompt.values()]
    if len(means) < 2:
        return fmean(means), None
    half = t.ppf(0.975, len(means) - 1) * stdev(means) / math.sqrt(len(means))
    return fmean(means), float(half)
