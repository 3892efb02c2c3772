"""Win rates, strengths and agreement of a study's answers. A tie and `both bad` are half a win.

Raters who fail more than ``most_failed`` of their attention checks are left out. A check is judged on the study's last
question: a clip beside itself must be a tie or both bad, and a pair that comes again must not have the other winner.
"""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import choix
import jinja2
import krippendorff
import numpy as np

from hyvideo.data.outside import parse_json
from hyvideo.evaluation.preference.answers import CHOICES, Study
from hyvideo.evaluation.preference.study import KEY, SIDES, VIDEOS
from hyvideo.evaluation.scores_file import write_csv
from hyvideo.evaluation.studies.intervals import Interval, t_quantile
from hyvideo.records.run_files import write_json, write_text

TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True)


def judgements(study: Study, key: dict) -> list[SimpleNamespace]:
    """Answers with what the key says of their pairs; ``winner`` a method or None, ``value`` 1 where the lower won."""
    given = [SimpleNamespace(**row, **key["pairs"][row["pair"]]) for row in study.rows()]
    for j in given:
        j.cell, j.winner = (j.unit, *sorted(j.methods)), None
        if j.answer in SIDES:
            j.winner = j.methods[SIDES.index(j.answer)]
        j.value = 0.5 if j.winner is None else float(j.winner == min(j.methods))
    return given


def failed_checks(given: list[SimpleNamespace]) -> dict[str, list[bool]]:
    """Each rater's attention checks, True where failed; ``given`` are answers to one question."""
    winners = {(j.rater, j.cell): j.winner for j in given if j.kind == "pair"}
    checks: dict[str, list[bool]] = {j.rater: [] for j in given}
    for j in given:
        if j.kind == "identical":
            checks[j.rater].append(j.winner is not None)
        elif j.kind == "repeat":
            checks[j.rater].append(len({j.winner, winners.get((j.rater, j.cell))} - {None}) == 2)
    return checks


def share_interval(values: list[float], raters: list[str], prompts: list[str]) -> Interval:
    """The mean of values in [0, 1], and its 95 % interval where raters and prompts are drawn both.

    The half width h is that of `studies.intervals` for a table with gaps, by cluster-robust variances (Cameron, Gelbach
    and Miller 2011), and at least that of independent cells. The interval is Wilson's for as many answers as would
    have this h. Where nothing varies every rater, or prompt if there are fewer, counts as one answer.
    """
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    x, mean, squared, sizes = np.array(values), float(np.mean(values)), [], []
    for clusters in (raters, prompts, [*map(repr, zip(raters, prompts))]):
        _, where = np.unique(clusters, return_inverse=True)
        sizes.append(int(where.max()) + 1)
        freedom = max(1, sizes[-1] - 1)
        variance = np.square(np.bincount(where, x - mean)).sum() / len(x) ** 2 * sizes[-1] / freedom
        squared.append(variance * t_quantile(freedom) ** 2)
    half, spread = max(squared[0] + squared[1] - squared[2], min(squared[:2]), squared[2]), mean * (1 - mean)
    ratio = half / spread if half > 1e-12 else t_quantile(max(1, min(sizes) - 1)) ** 2 / min(sizes)
    centre, width = (mean + ratio / 2) / (1 + ratio), math.sqrt(ratio * spread + ratio**2 / 4) / (1 + ratio)
    return Interval(mean, min(mean, centre - width), max(mean, centre + width))


def share(given: list[SimpleNamespace], values: list[float]) -> dict:
    """Mean and interval of values that belong to judgements, and the number of judgements by answer."""
    interval = share_interval(values, [j.rater for j in given], [j.prompt for j in given])
    return interval.as_json() | {choice: sum(j.answer == choice for j in given) for choice in CHOICES}


def strengths(given: list[SimpleNamespace], methods: list[str]) -> dict[str, float]:
    """Bradley-Terry strengths: log odds against an average method. Half a win of each over each keeps them finite."""
    wins = 0.5 - 0.5 * np.eye(len(methods))
    for j in given:
        low, high = sorted(j.methods)
        wins[low, high] += j.value
        wins[high, low] += 1 - j.value
    return dict(zip(methods, choix.ilsr_pairwise_dense(wins, max_iter=1000).tolist()))


def alpha(given: list[SimpleNamespace]) -> float | None:
    """Krippendorff's alpha of win, tie and loss as ordered; None where no pair has two raters, or all answer alike."""
    rows, columns = (sorted({getattr(j, name) for j in given}) for name in ("rater", "cell"))
    table = np.full((len(rows), len(columns)), np.nan)
    for j in given:
        table[rows.index(j.rater), columns.index(j.cell)] = j.value
    shared = table[:, np.isfinite(table).sum(0) > 1]
    if len(np.unique(shared[np.isfinite(shared)])) < 2:
        return None
    return float(krippendorff.alpha(shared, level_of_measurement="ordinal"))


def agreement(given: list[SimpleNamespace], question: str) -> dict:
    """Share of decided answers whose winner has the higher score, where both clips have one by the question's name."""
    known, values = [], []
    for j in given:
        scores = [{k.lower(): v for k, v in of_clip.items()}.get(question.lower()) for of_clip in j.scores]
        if j.winner is not None and None not in scores and scores[0] != scores[1]:
            known.append(j)
            values.append(float(j.methods[int(np.argmax(scores))] == j.winner))
    return share(known, values)


def analyse(study: Study, most_failed: float) -> str:
    """Writes table3.md, .csv and .tex, pairs.csv, analysis.json and .md, and gives the text of the last.

    Raises ValueError where no answer counts.
    """
    key = parse_json((study.folder / KEY).read_text(encoding="utf-8"))
    methods, given, questions = key["methods"], judgements(study, key), list(study.questions)
    checks = failed_checks([j for j in given if j.question == questions[-1]])
    left_out = [rater for rater, failed in checks.items() if sum(failed) > most_failed * len(failed)]
    counted = [j for j in given if j.kind == "pair" and j.rater not in left_out]
    if not counted:
        raise ValueError(f"no answers in {study.folder} count; raters left out: {', '.join(left_out) or 'none'}")
    asked = {question: [j for j in counted if j.question == question] for question in questions}
    decided = {question: [j for j in of if j.winner is not None] for question, of in asked.items()}
    rates = []
    for low, high in itertools.combinations(range(len(methods)), 2):
        of_pair = {q: [j for j in of if j.cell[1:] == (low, high)] for q, of in asked.items()}
        shares = {q: share(of, [j.value for j in of]) for q, of in of_pair.items()}
        raters = len({j.rater for of in of_pair.values() for j in of})
        rates.append({"method": methods[low], "against": methods[high], "raters": raters, "shares": shares})
    results = {
        "checks": {r: {"failed": sum(f), "of": len(f), "left_out": r in left_out} for r, f in checks.items()},
        "most_failed": most_failed,
        "prompts": len({j.prompt for j in counted}),
        "win_rates": rates,
        "strengths": {q: strengths(of, methods) for q, of in asked.items()},
        "alpha": {q: alpha(of) for q, of in asked.items()},
        "first_side": {q: share(of, [float(j.answer == "first") for j in of]) for q, of in decided.items()},
        "reward_model": {q: agreement(of, q) for q, of in asked.items()},
    }
    write_json(study.folder / "analysis.json", results)
    for name in ("table3.md", "table3.csv", "table3.tex", "analysis.md"):
        write_text(study.folder / name, TEMPLATES.get_template(f"{name}.jinja").render(results, questions=questions))
    paths = [{side: f"{VIDEOS}/{getattr(j, side)}" for side in SIDES} for j in counted]
    told = [{"dimension": j.question, "answer": j.answer, "rater": j.rater} for j in counted]
    write_csv(study.folder / "pairs.csv", ({"prompt": j.prompt} | p | t for j, p, t in zip(counted, paths, told)))
    return (study.folder / "analysis.md").read_text(encoding="utf-8")
