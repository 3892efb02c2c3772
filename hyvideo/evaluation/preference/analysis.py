"""Win rates, strengths and agreement of a study's answers, by the rules that analysis.md.jinja states."""

import functools
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import choix
import krippendorff
import numpy as np

from hyvideo.data.outside import parse_json
from hyvideo.data.templates import fill
from hyvideo.evaluation.preference.rating import KEY, Study
from hyvideo.evaluation.studies.intervals import t_quantile

OF_FIRST = {"first": 1.0, "second": 0.0, "tie": 0.5, "both_bad": 0.5}  # the first clip's part of a win


def judgements(study: Study, pairs: dict) -> list[SimpleNamespace]:
    """Answers with what the key says of their pairs, and what follows from both: None where nothing does."""
    given, before = [SimpleNamespace(**row, **pairs[row["pair"]]) for row in study.rows()], {}
    for j in given:
        won, j.versus = OF_FIRST[j.answer], tuple(sorted(j.methods))
        j.value = won if j.methods == [*j.versus] else 1 - won  # of the earlier method
        j.is_first = None if won == 0.5 else won
        first, second = (scores_of(Path(file).parent).get(Path(file).name, {}).get(j.dimension) for file in j.sources)
        has_order = won != 0.5 and None not in (first, second) and first != second
        j.is_scored_higher = float((first > second) == won) if has_order else None
        value = before.setdefault((j.rater, j.dimension, j.unit, j.versus), j.value)
        j.is_failed = won != 0.5 if j.kind == "identical" else abs(j.value - value) == 1
    return given


@functools.cache
def scores_of(folder: Path) -> dict[str, dict]:
    """Scores of a folder's videos by file, of a run or of scripts.evaluate in scores/; empty where there are none."""
    for path in (folder / "scores.json", folder / "scores" / "scores.json"):
        if path.is_file():
            content = parse_json(path.read_text(encoding="utf-8"))
            return {entry["file"]: entry for entry in (content["videos"] if isinstance(content, dict) else content)}
    return {}


def share(given: list[SimpleNamespace], name: str) -> dict[str, float | None]:
    """The mean of what judgements say, in [0, 1], and its 95 % interval where raters and prompts are drawn both.

    The half width is that of `studies.intervals` for a table with gaps, by cluster-robust variances (Cameron, Gelbach
    and Miller 2011), and at least that of independent cells. The interval is Wilson's for as many answers as have this
    width. Where nothing varies every rater, or prompt if there are fewer, counts as one answer.
    """
    told = [(getattr(j, name), j.rater, j.prompt) for j in given if getattr(j, name) is not None]
    if not told:
        return {"mean": None, "low": None, "high": None}
    values, raters, prompts = zip(*told)
    mean, squared = sum(values) / len(values), []
    for clusters in (raters, prompts, zip(raters, prompts)):
        sums = Counter()
        for cluster, value in zip(clusters, values):
            sums[cluster] += value - mean
        freedom = max(1, len(sums) - 1)
        scale = t_quantile(freedom) ** 2 * len(sums) / freedom / len(values) ** 2
        squared.append(scale * sum(total**2 for total in sums.values()))
    half, spread = max(squared[0] + squared[1] - squared[2], min(squared[:2]), squared[2]), mean * (1 - mean)
    fewest = min(len(set(raters)), len(set(prompts)))
    ratio = half / spread if half > 1e-12 else t_quantile(max(1, fewest - 1)) ** 2 / fewest
    centre, width = (mean + ratio / 2) / (1 + ratio), math.sqrt(ratio * spread + ratio**2 / 4) / (1 + ratio)
    return {"mean": mean, "low": min(mean, centre - width), "high": max(mean, centre + width)}


def of_dimension(given: list[SimpleNamespace], methods: list[str]) -> dict:
    """Results of the answers to one question; alpha is None where no pair has two raters, or all answer alike."""
    rates, wins = [], [*itertools.permutations(range(len(methods)), 2)]
    for a, b in itertools.combinations(range(len(methods)), 2):
        of_both = [j for j in given if j.versus == (a, b)]
        told = {"method": methods[a], "against": methods[b], "raters": len({j.rater for j in of_both})}
        rates.append(told | share(of_both, "value"))
        won = int(sum(2 * j.value for j in of_both))  # an answer counts two wins, one of each where it is a tie
        wins += [(a, b)] * won + [(b, a)] * (2 * len(of_both) - won)
    cells = Counter((j.unit, j.versus, j.value) for j in given)
    counts = [[cells[unit, versus, value] for value in (0.0, 0.5, 1.0)] for unit, versus in {c[:2] for c in cells}]
    shared = [count for count in counts if sum(count) > 1]
    with np.errstate(invalid="ignore"):
        alpha = krippendorff.alpha(value_counts=shared, level_of_measurement="ordinal") if shared else math.nan
    return {
        "win_rates": rates,
        "strengths": dict(zip(methods, choix.ilsr_pairwise(len(methods), wins, max_iter=1000).tolist())),
        "alpha": float(alpha) if math.isfinite(alpha) else None,
        "first_side": share(given, "is_first"),
        "reward_model": share(given, "is_scored_higher"),
    }


def analyse(study: Study, most_failed: float) -> str:
    """Writes table3, pairs.csv and analysis to the study's folder; gives the text. ValueError if no answer counts."""
    key, questions = parse_json((study.folder / KEY).read_text(encoding="utf-8")), list(study.questions)
    given = judgements(study, key["pairs"])
    checks: dict[str, list[bool]] = {j.rater: [] for j in given}
    for j in given:
        if j.kind != "pair" and j.dimension == questions[-1]:
            checks[j.rater].append(j.is_failed)
    left_out = [rater for rater, failed in checks.items() if sum(failed) > most_failed * len(failed)]
    counted = [j for j in given if j.kind == "pair" and j.rater not in left_out and j.dimension in questions]
    if not counted:
        raise ValueError(f"no answers to {', '.join(questions)} count; left out: {', '.join(left_out) or 'none'}")
    asked = {name: [j for j in counted if j.dimension == name] for name in questions}
    of_each = {name: of_dimension(answers, key["methods"]) for name, answers in asked.items() if answers}
    told = {"methods": key["methods"], "most_failed": most_failed, "checks": checks, "left_out": left_out}
    results = told | {"questions": of_each}
    (study.folder / "analysis.json").write_text(json.dumps(results, indent=1, allow_nan=False), encoding="utf-8")
    rows = list(zip(*(of["win_rates"] for of in of_each.values())))
    for name in ("pairs.csv", "table3.md", "table3.csv", "table3.tex", "analysis.md"):
        text = fill(Path(__file__).with_name(f"{name}.jinja"), **results, counted=counted, rows=rows)
        (study.folder / name).write_text(text + "\n", encoding="utf-8")
    return text
