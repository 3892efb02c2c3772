"""Win rates, strengths and agreement of a study's answers; analysis.md describes the rules."""

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
from hyvideo.evaluation.preference import tables
from hyvideo.evaluation.preference.rating import KEY, Study
from hyvideo.evaluation.studies.intervals import t_quantile

FIRST_SHARE = {"first": 1.0, "second": 0.0, "tie": 0.5, "both_bad": 0.5}  # share of a win for the first video


def judgements(study: Study, pairs: dict) -> list[SimpleNamespace]:
    """Join the answers with the key of their pairs and derive wins and failed checks; undefined values are None."""
    given, before = [SimpleNamespace(**row, **pairs[row["pair"]]) for row in study.rows()], {}
    for j in given:
        won, j.versus = FIRST_SHARE[j.answer], tuple(sorted(j.methods))
        j.value = won if j.methods == [*j.versus] else 1 - won  # share of a win for the earlier method
        j.is_first = None if won == 0.5 else won
        first, second = (scores_of(Path(file).parent).get(Path(file).name, {}).get(j.dimension) for file in j.sources)
        has_order = won != 0.5 and None not in (first, second) and first != second
        j.is_scored_higher = float((first > second) == won) if has_order else None
        value = before.setdefault((j.rater, j.dimension, j.unit, j.versus), j.value)
        j.is_failed = won != 0.5 if j.kind == "identical" else abs(j.value - value) == 1
    return given


@functools.cache
def scores_of(folder: Path) -> dict[str, dict]:
    """Return the scores that a run or scripts.evaluate wrote for a folder's videos, by file; empty without them."""
    for path in (folder / "scores.json", folder / "scores" / "scores.json"):
        if path.is_file():
            content = parse_json(path.read_text(encoding="utf-8"))
            return {entry["file"]: entry for entry in (content["videos"] if isinstance(content, dict) else content)}
    return {}


def share(given: list[SimpleNamespace], name: str) -> dict[str, float | None]:
    """Return the mean of a judgement in [0, 1] and its 95 % interval, with both raters and prompts as random samples.

    The half width is that of `studies.intervals` for a table with gaps, from cluster-robust variances (Cameron, Gelbach
    and Miller 2011), and at least that of independent cells. The interval is Wilson's for the number of answers that
    gives this width. Without variation every rater, or prompt if there are fewer, counts as one answer.
    """
    defined = [(getattr(j, name), j.rater, j.prompt) for j in given if getattr(j, name) is not None]
    if not defined:
        return {"mean": None, "low": None, "high": None}
    values, raters, prompts = zip(*defined)
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


def question_results(given: list[SimpleNamespace], methods: list[str]) -> dict:
    """Return the results of one question; alpha is None if no pair has two raters, or all answers are equal."""
    rates, wins = [], [*itertools.permutations(range(len(methods)), 2)]
    for a, b in itertools.combinations(range(len(methods)), 2):
        answers = [j for j in given if j.versus == (a, b)]
        labels = {"method": methods[a], "against": methods[b], "raters": len({j.rater for j in answers})}
        rates.append(labels | share(answers, "value"))
        won = int(sum(2 * j.value for j in answers))  # an answer counts as two wins, a tie as one for each
        wins += [(a, b)] * won + [(b, a)] * (2 * len(answers) - won)
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
    """Write table3, pairs.csv and the analysis; return its text. Raises ValueError if no answers remain."""
    key, questions = parse_json((study.folder / KEY).read_text(encoding="utf-8")), list(study.questions)
    given = judgements(study, key["pairs"])
    checks: dict[str, list[bool]] = {j.rater: [] for j in given}
    for j in given:
        if j.kind != "pair" and j.dimension == questions[-1]:
            checks[j.rater].append(j.is_failed)
    left_out = [rater for rater, failed in checks.items() if sum(failed) > most_failed * len(failed)]
    counted = [j for j in given if j.kind == "pair" and j.rater not in left_out and j.dimension in questions]
    if not counted:
        excluded = f"excluded for failing more than {most_failed:.0%} of their checks: {', '.join(left_out) or 'none'}"
        raise ValueError(f"no answers to {', '.join(questions)} remain; raters {excluded}")
    by_question = {name: [j for j in counted if j.dimension == name] for name in questions}
    by_name = {name: question_results(answers, key["methods"]) for name, answers in by_question.items() if answers}
    general = {"methods": key["methods"], "most_failed": most_failed, "checks": checks, "left_out": left_out}
    results = general | {"questions": by_name}
    (study.folder / "analysis.json").write_text(json.dumps(results, indent=1, allow_nan=False), encoding="utf-8")
    text = tables.analysis_md(results, counted)
    files = {
        "pairs.csv": tables.pairs_csv(counted),
        "table3.md": tables.table3_md(by_name, counted),
        "table3.csv": tables.table3_csv(by_name),
        "table3.tex": tables.table3_tex(by_name, counted),
        "analysis.md": text,
    }
    for name, content in files.items():
        (study.folder / name).write_text(content + "\n", encoding="utf-8")
    return text
