"""Win rates of a study's answers, and the answers as pairs to train on."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hyvideo.data.examples import PAIRS_FILE
from hyvideo.files.files import publish, read_json
from hyvideo.files.tables import csv_text
from hyvideo.ratings.rating import KEY, Study
from hyvideo.validation.intervals import t_quantile

# share of a win for the first video
FIRST_SHARE = {"first": 1.0, "second": 0.0, "tie": 0.5, "both_bad": 0.5}


@dataclass(frozen=True)
class Judgement:
    """An answer of a rater to a question about a pair, with the methods of the pair."""

    rater: str
    dimension: str  # name of the question
    answer: str
    prompt: str
    first: str  # files, relative to the study's folder
    second: str
    ref_image_path: str
    ref_last_image_path: str
    versus: tuple[int, int]  # methods, the earlier first
    value: float  # share of a win for the earlier method


def read_key(study: Study) -> dict:
    """Return the methods of a study, and those of each pair."""
    return read_json(study.folder / KEY, "key")


def judgements(study: Study, key: dict) -> list[Judgement]:
    """Join the answers with the key of their pairs."""
    given = []
    for row in study.rows():
        pair = key["pairs"][row["pair"]]
        first, second = pair["methods"]
        won = FIRST_SHARE[row["answer"]]
        judgement = Judgement(
            rater=row["rater"],
            dimension=row["dimension"],
            answer=row["answer"],
            prompt=pair["prompt"],
            first=pair["first"],
            second=pair["second"],
            ref_image_path=pair.get("ref_image_path", ""),
            ref_last_image_path=pair.get("ref_last_image_path", ""),
            versus=(min(first, second), max(first, second)),
            value=won if first < second else 1 - won,
        )
        given.append(judgement)
    return given


def share(given: Sequence[Judgement]) -> dict[str, float]:
    """Return the mean value of answers and its 95 % interval, with both raters and prompts as random
    samples.

    The half width is that of `hyvideo.validation.intervals` for a table with gaps, from
    cluster-robust variances (Cameron, Gelbach and Miller 2011), and at least that of independent
    cells. The interval is Wilson's for the number of answers that gives this width. Without
    variation every rater, or prompt if there are fewer, counts as one answer.
    """
    values = [j.value for j in given]
    raters = [j.rater for j in given]
    prompts = [j.prompt for j in given]
    mean = sum(values) / len(values)
    squared = []
    for clusters in (raters, prompts, zip(raters, prompts)):
        sums = Counter()
        for cluster, value in zip(clusters, values):
            sums[cluster] += value - mean
        freedom = max(1, len(sums) - 1)
        scale = t_quantile(freedom) ** 2 * len(sums) / freedom / len(values) ** 2
        squared.append(scale * sum(total**2 for total in sums.values()))
    half = max(squared[0] + squared[1] - squared[2], min(squared[:2]), squared[2])
    spread = mean * (1 - mean)
    fewest = min(len(set(raters)), len(set(prompts)))
    if half > 1e-12:
        ratio = half / spread
    else:
        ratio = t_quantile(max(1, fewest - 1)) ** 2 / fewest
    centre = (mean + ratio / 2) / (1 + ratio)
    width = math.sqrt(ratio * spread + ratio**2 / 4) / (1 + ratio)
    return {"mean": mean, "low": min(mean, centre - width), "high": max(mean, centre + width)}


def win_rates(given: Sequence[Judgement], methods: Sequence[str]) -> list[dict]:
    """Return a win rate for each two methods that the answers to one question compare."""
    rates = []
    for a, b in itertools.combinations(range(len(methods)), 2):
        answers = [j for j in given if j.versus == (a, b)]
        if answers:
            labels = {"method": methods[a], "against": methods[b], "answers": len(answers)}
            rates.append(labels | share(answers))
    return rates


def pairs_csv(given: Sequence[Judgement]) -> str:
    """Format the answers as pairs to train on, with the given frames if there are any."""
    columns = ["prompt", "first", "second", "dimension", "answer", "rater"]
    for column in ("ref_image_path", "ref_last_image_path"):
        if any(getattr(j, column) for j in given):
            columns.append(column)
    return csv_text(columns, [[getattr(j, name) for name in columns] for j in given])


def analyze(study: Study) -> str:
    """Write pairs.csv, analysis.json and analysis.md, and return the text of the latter.

    Raises ValueError without answers.
    """
    key = read_key(study)
    given = judgements(study, key)
    if not given:
        raise ValueError(f"{study.folder} has no answers yet")
    questions = {}
    for name in study.questions:
        answers = [j for j in given if j.dimension == name]
        questions[name] = win_rates(answers, key["methods"])
    num_raters = len({j.rater for j in given})
    results = {"methods": key["methods"], "raters": num_raters, "questions": questions}
    text = as_markdown(questions, num_raters, len({j.prompt for j in given}))
    files = {
        PAIRS_FILE: pairs_csv(given),
        "analysis.json": json.dumps(results, indent=1, allow_nan=False),
        "analysis.md": text,
    }
    for name, content in files.items():
        with publish(study.folder / name) as path:
            path.write_text(content, encoding="utf-8")
    return text


def as_markdown(questions: dict[str, list[dict]], num_raters: int, num_prompts: int) -> str:
    """Return a table of the win rates with a row for each question and two methods."""
    lines = ["| Question | Method | Against | Answers | Win rate (%) |", "|---|---|---|---|---|"]
    for name, rates in questions.items():
        for rate in rates:
            mean, low, high = (100 * rate[bound] for bound in ("mean", "low", "high"))
            cells = [name, rate["method"], rate["against"], str(rate["answers"])]
            cells = [cell.replace("|", "\\|") for cell in cells]
            lines.append(f"| {' | '.join(cells)} | {mean:.1f} [{low:.1f}, {high:.1f}] |")
    lines += [
        "",
        f"Win rate of the method: {num_raters} raters, {num_prompts} prompts; a tie or both bad "
        "counts as half a win. Brackets: 95 % intervals over raters and prompts.",
    ]
    return "\n".join(lines) + "\n"
