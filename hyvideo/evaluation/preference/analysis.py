"""Win rates, strengths and agreement of a study's answers. A tie and `both bad` are half a win.

Raters who fail more than ``most_failed`` of their attention checks are left out. A check is judged on the study's last
question: a clip beside itself must be a tie or both bad, and a pair that comes again must not have the other winner.
"""

import itertools
import math
from pathlib import Path
from typing import NamedTuple

import choix
import jinja2
import krippendorff
import numpy as np

from hyvideo.data.outside import parse_json
from hyvideo.evaluation.preference.answers import CHOICES, Study
from hyvideo.evaluation.preference.study import KEY, VIDEOS
from hyvideo.evaluation.scores_file import write_csv
from hyvideo.evaluation.studies.intervals import Interval, t_quantile
from hyvideo.records.run_files import write_json, write_text

TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True)


class Judgement(NamedTuple):
    """An answer, and what the key says of its pair."""

    rater: str
    question: str
    answer: str
    kind: str
    prompt: str
    files: tuple[str, str]  # as shown
    cell: tuple[int, int, int]  # unit, and the two methods in their order
    winner: str | None  # file
    value: float  # 1: the method with the lower number won, 0: the other, one half: neither


def judgements(study: Study, key: dict) -> list[Judgement]:
    pairs = {name: pair for pairs in study.pairs.values() for name, pair in pairs.items()}
    found = []
    for row in study.rows():
        pair = pairs[row["pair"]]
        files = pair["first"], pair["second"]
        methods = [key["methods"].index(key["videos"][file]["method"]) for file in files]
        winner = files[row["answer"] == "second"] if row["answer"] in ("first", "second") else None
        value = 0.5 if winner is None else float((winner == files[0]) == (methods[0] < methods[1]))
        told = key["kinds"][row["pair"]], pair["prompt"], files, (key["videos"][files[0]]["unit"], *sorted(methods))
        found.append(Judgement(row["rater"], row["question"], row["answer"], *told, winner, value))
    return found


def failed_checks(given: list[Judgement]) -> dict[str, list[bool]]:
    """Whether each rater failed each attention check; ``given`` are answers to one question."""
    winners = {(j.rater, *j.files): j.winner for j in given if j.kind == "pair"}
    checks: dict[str, list[bool]] = {j.rater: [] for j in given}
    for j in given:
        if j.kind == "identical":
            checks[j.rater].append(j.winner is not None)
        elif j.kind == "repeat":
            checks[j.rater].append(len({j.winner, winners.get((j.rater, *j.files[::-1]))} - {None}) == 2)
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
    half, spread, fewest = (
        max(sum(squared[:2]) - squared[2], *squared[2:], min(squared[:2])),
        mean * (1 - mean),
        min(sizes),
    )
    ratio = half / spread if half > 1e-12 else t_quantile(max(1, fewest - 1)) ** 2 / fewest
    centre, width = (mean + ratio / 2) / (1 + ratio), math.sqrt(ratio * spread + ratio**2 / 4) / (1 + ratio)
    return Interval(mean, min(mean, centre - width), max(mean, centre + width))


def share(given: list[Judgement], values: list[float]) -> dict:
    """The mean of values that belong to judgements and its interval, and the number of judgements by answer."""
    interval = share_interval(values, [j.rater for j in given], [j.prompt for j in given])
    return interval.as_json() | {choice: sum(j.answer == choice for j in given) for choice in CHOICES}


def strengths(given: list[Judgement], methods: list[str]) -> dict[str, float]:
    """Bradley-Terry strengths: log odds against an average method. Half a win of each over each keeps them finite."""
    wins = 0.5 - 0.5 * np.eye(len(methods))
    for j in given:
        _, low, high = j.cell
        wins[low, high] += j.value
        wins[high, low] += 1 - j.value
    return dict(zip(methods, choix.ilsr_pairwise_dense(wins, max_iter=1000).tolist()))


def alpha(given: list[Judgement]) -> float | None:
    """Krippendorff's alpha of win, tie and loss as ordered; None where no pair has two raters, or all answer alike."""
    rows, columns = (sorted({getattr(j, name) for j in given}) for name in ("rater", "cell"))
    table = np.full((len(rows), len(columns)), np.nan)
    for j in given:
        table[rows.index(j.rater), columns.index(j.cell)] = j.value
    shared = table[:, np.isfinite(table).sum(0) > 1]
    has_values = len(np.unique(shared[np.isfinite(shared)])) > 1
    return float(krippendorff.alpha(table, level_of_measurement="ordinal")) if has_values else None


def agreement(given: list[Judgement], videos: dict[str, dict]) -> dict:
    """Share of decided answers whose winner has the higher score, of those where both have one of the question's name."""
    score = {(file, name.lower()): value for file, video in videos.items() for name, value in video["scores"].items()}
    of = [(j, *(score.get((file, j.question.lower())) for file in j.files)) for j in given if j.winner]
    known = [(j, float((a > b) == (j.winner == j.files[0]))) for j, a, b in of if None not in (a, b) and a != b]
    return share([j for j, _ in known], [value for _, value in known])


def analyse(study: Study, most_failed: float, out: Path) -> str:
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
    decided = {question: [j for j in of if j.winner] for question, of in asked.items()}
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
        "reward_model": {q: agreement(of, key["videos"]) for q, of in asked.items()},
    }
    write_json(out / "analysis.json", results)
    for name in ("table3.md", "table3.csv", "table3.tex", "analysis.md"):
        write_text(out / name, TEMPLATES.get_template(f"{name}.jinja").render(results, questions=questions))
    files = [dict(zip(("first", "second"), (f"{VIDEOS}/{file}" for file in j.files))) for j in counted]
    told = [{"dimension": j.question, "answer": j.answer, "rater": j.rater} for j in counted]
    write_csv(out / "pairs.csv", ({"prompt": j.prompt} | f | t for j, f, t in zip(counted, files, told)))
    return (out / "analysis.md").read_text(encoding="utf-8")
