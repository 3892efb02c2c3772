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
        page = file.read_text(encoding="utf-8")
        data = re.search(
            r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
        )
        if data is None:
            raise CannotCheck("report.html has no data")
        (shown,) = json.loads(data[1])["runs"].values()
        # the report of a run that goes on is that of its last validation
        last = shown["iterations"]
        rows.equal("last iteration", min(last, run.last_iteration), last)
        lines = [line for line in run.metrics if 0 < line["iteration"] <= last]
        if len(lines) <= CURVES:
            for name, points in shown["metrics"].items():
                rows.equal(f"points of {name}", len(lines), len(points))
                for line, point in zip(lines, points):
                    value = line.get(name)
                    if isinstance(value, int | float):
                        where = f"{name} of iteration {line['iteration']}"
                        rows.number(where, value, point, max(abs(value), 1e-12))
        expected, given = gain(run, last), shown["gain"]
        rows.equal("whether there is a gain", expected is not None, given is not None)
        if expected and given:
            mean, half = expected
            rows.number("gain of the reward", mean, given["mean"])
            if printed := re.search(r'class="gain">([+−]?\d+\.(\d+))', page):
                rounding = 0.51 * 10.0 ** -len(printed[2])
                value = float(printed[1].replace("−", "-"))
                rows.small("printed gain, its difference", abs(mean - value), rounding)
            if half is not None:
                rows.number("lower end of the gain's interval", mean - half, given["low"])
                rows.number("upper end of the gain's interval", mean + half, given["high"])


def gain(run: Run, last: int) -> tuple[float, float | None] | None:
    """Return the mean gain of the validation reward over the prompts until iteration ``last``, and
    half of its 95 % interval by Student's t; None without two validations.
    """
    from scipy.stats import t

    validations = {i: entries for i, entries in run.validations.items() if i <= last}
    if 0 not in validations or max(validations) == 0:
        return None
    before = {entry["number"]: entry for entry in validations[0]}
    by_prompt = defaultdict(list)
    for entry in validations[max(validations)]:
        first = before[entry["number"]]["reward"]
        if None not in (first, entry["reward"]):
            by_prompt[entry["group"]].append(entry["reward"] - first)
    means = [fmean(values) for values in by_prompt.values()]
    if not means:
        return None
    if len(means) < 2:
        return fmean(means), None
    half = t.ppf(0.975, len(means) - 1) * stdev(means) / math.sqrt(len(means))
    return fmean(means), float(half)
