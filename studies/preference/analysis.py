"""Win rates, strengths and agreement of a study's answers; analysis.md describes the rules."""

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import choix
import krippendorff
import numpy as np

from hyvideo.data.digests import digest_file
from hyvideo.data.examples import PAIRS_FILE
from hyvideo.data.files import publish, read_json
from hyvideo.data.text import quote
from hyvideo.validation.intervals import t_quantile
from studies.preference import tables
from studies.preference.rating import DATABASE, KEY, STUDY, Study

KINDS = ("pair", "repeat", "identical")
MOST_FAILED = 0.5  # share of the checks that a rater may fail
MIN_ONE_SIDED = 8  # fewest preferences from which a rater counts as one-sided
# share of a win for the first video
FIRST_SHARE = {"first": 1.0, "second": 0.0, "tie": 0.5, "both_bad": 0.5}


def read_key(study: Study) -> dict:
    """Return the methods, and the kind and methods of each pair.

    Raises ValueError if the key is not of this study.
    """
    path = study.folder / KEY
    key = read_json(path, "key")
    served = {
        name: pair for rater in study.raters.values() for name, pair in rater["pairs"].items()
    }
    try:
        methods = key["methods"]
        if len(methods) < 2 or len(set(methods)) < len(methods):
            raise ValueError(f"methods {quote(methods)}")
        if key["pairs"].keys() != served.keys():
            raise ValueError("the pairs differ")
        for name, pair in key["pairs"].items():
            _check_pair(pair, served[name], len(methods))
        hashes = dict(key.get("hashes", {}))  # earlier keys have none
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must be the key of {study.folder / STUDY}, as `make` wrote both: one of them "
            f"was changed or belongs to another study ({error!r}); restore it"
        ) from error
    for name, digest in hashes.items():
        video = study.folder / name
        # videos may be deleted after the study
        if video.is_file() and digest_file(video) != digest:
            raise ValueError(
                f"{quote(video)} has changed since `make` wrote the study, so that raters may have "
                "seen another video; restore it, and leave out raters who saw the other one with "
                "--exclude"
            )
    return key


def _check_pair(pair: dict, served: dict, num_methods: int) -> None:
    """Raise an exception if a pair of the key is invalid or differs from the pair that
    raters see.
    """
    if any(pair[name] != value for name, value in served.items()):
        raise ValueError(f"raters see {quote(served)}, not {quote(pair)}")
    are_sources = len(pair["sources"]) == 2 and all(isinstance(s, str) for s in pair["sources"])
    if pair["kind"] not in KINDS or not isinstance(pair["unit"], int) or not are_sources:
        raise ValueError(f"pair {quote(pair)}")
    first, second = pair["methods"]
    is_identical = pair["kind"] == "identical"
    if (
        first not in range(num_methods)
        or second not in range(num_methods)
        or (first == second) != is_identical
    ):
        raise ValueError(f"methods {quote(pair['methods'])} of {num_methods}")


def check_answers(study: Study) -> None:
    """Raise ValueError if the database has an answer that the page cannot have stored."""
    owners = {pair: rater["name"] for rater in study.raters.values() for pair in rater["pairs"]}
    for row in study.rows():
        is_of_rater = row["pair"] in owners and row["rater"] == owners[row["pair"]]
        if not is_of_rater or row["answer"] not in FIRST_SHARE:
            raise ValueError(
                f"{study.folder / DATABASE} must have the answers of the raters in {STUDY}, got "
                f"{quote(tuple(row))}: the file was changed or belongs to another study; restore it"
            )


def judgements(study: Study, pairs: dict) -> list[SimpleNamespace]:
    """Join the answers with the key of their pairs and derive wins and failed checks; undefined
    values are None.
    """
    no_image = {"ref_image_path": ""}
    given = [SimpleNamespace(**row, **(no_image | pairs[row["pair"]])) for row in study.rows()]
    before = {}
    for j in given:
        won = FIRST_SHARE[j.answer]
        j.versus = tuple(sorted(j.methods))
        # share of a win for the earlier method
        j.value = won if j.methods == list(j.versus) else 1 - won
        is_tie = won == 0.5
        j.is_first = None if is_tie else won
        first, second = (_score(Path(file), j.dimension) for file in j.sources)
        j.is_scored_higher = None
        if not is_tie and None not in (first, second) and first != second:
            j.is_scored_higher = float((first > second) == won)
        value = before.setdefault((j.rater, j.dimension, j.unit, j.versus), j.value)
        if j.kind == "identical":
            j.is_failed = not is_tie
        else:
            j.is_failed = abs(j.value - value) == 1
    return given


def _score(file: Path, dimension: str) -> float | None:
    """Return a recorded score of a video; None if there is none, or if it is not a finite
    number.
    """
    score = scores_of(file.parent).get(file.name, {}).get(dimension)
    return score if isinstance(score, int | float) and math.isfinite(score) else None


@functools.cache
def scores_of(folder: Path) -> dict[str, dict]:
    """Return the scores that a run or scripts.evaluate wrote for a folder's videos, by file; empty
    without them.

    Raises ValueError for a corrupted file.
    """
    for path in (folder / "scores.json", folder / "scores" / "scores.json"):
        if path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                entries = content["videos"] if isinstance(content, dict) else content
                return {entry["file"]: dict(entry) for entry in entries}
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(
                    f"{path} must be a list of videos with scores ({error!r}); restore it, or "
                    "delete it to analyze the study without the scores"
                ) from error
    return {}


def share(given: list[SimpleNamespace], name: str) -> dict[str, float | None]:
    """Return the mean of a judgement in [0, 1] and its 95 % interval, with both raters and prompts
    as random samples.

    The half width is that of `hyvideo.validation.intervals` for a table with gaps, from
    cluster-robust variances (Cameron, Gelbach and Miller 2011), and at least that of independent
    cells. The interval is Wilson's for the number of answers that gives this width. Without
    variation every rater, or prompt if there are fewer, counts as one answer.
    """
    defined = [(getattr(j, name), j.rater, j.prompt) for j in given if getattr(j, name) is not None]
    if not defined:
        return {"mean": None, "low": None, "high": None}
    values, raters, prompts = zip(*defined)
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


def question_results(given: list[SimpleNamespace], methods: list[str]) -> dict:
    """Return the results of one question."""
    rates = []
    wins = list(itertools.permutations(range(len(methods)), 2))
    for a, b in itertools.combinations(range(len(methods)), 2):
        answers = [j for j in given if j.versus == (a, b)]
        labels = {
            "method": methods[a],
            "against": methods[b],
            "raters": len({j.rater for j in answers}),
        }
        rates.append(labels | share(answers, "value"))
        # an answer counts as two wins, a tie as one for each
        won = int(sum(2 * j.value for j in answers))
        wins += [(a, b)] * won + [(b, a)] * (2 * len(answers) - won)
    strengths = choix.ilsr_pairwise(len(methods), wins, max_iter=1000).tolist()
    return {
        "win_rates": rates,
        "strengths": dict(zip(methods, strengths)),
        "alpha": agreement(given),
        "first_side": share(given, "is_first"),
        "reward_model": share(given, "is_scored_higher"),
    }


def agreement(given: list[SimpleNamespace]) -> float | None:
    """Return Krippendorff's alpha of the answers to one question; None if no pair has two raters, or
    all answers are equal.
    """
    # Answers by pair: losses, ties and wins of the first method. Ordinal alpha needs ascending values.
    num_answers = Counter((j.unit, j.versus, j.value) for j in given)
    counts_by_pair = [
        [num_answers[unit, versus, value] for value in (0.0, 0.5, 1.0)]
        for unit, versus in {key[:2] for key in num_answers}
    ]
    shared = [counts for counts in counts_by_pair if sum(counts) > 1]
    alpha = math.nan
    if shared:
        with np.errstate(invalid="ignore"):
            alpha = float(krippendorff.alpha(value_counts=shared, level_of_measurement="ordinal"))
    return alpha if math.isfinite(alpha) else None


def one_sided(given: list[SimpleNamespace], question: str) -> dict[str, str]:
    """Return the raters who prefer the same side in all their pairs, with this side, A or B.

    Only pairs with a preference count, without the checks, in the answers to one ``question``. At
    least eight are needed: a rater without a bias has one side in all of them in less than 1 % of
    cases.
    """
    sides: dict[str, list[float]] = {}
    for j in given:
        if j.kind == "pair" and j.dimension == question and j.is_first is not None:
            sides.setdefault(j.rater, []).append(j.is_first)
    return {
        rater: "A" if chosen[0] else "B"
        for rater, chosen in sides.items()
        if len(chosen) >= MIN_ONE_SIDED and len(set(chosen)) == 1
    }


@dataclass(frozen=True)
class Counted:
    """The answers of a study, and those that count."""

    given: list[SimpleNamespace]
    checks: dict[str, list[bool]]  # of each rater with answers: whether each check was failed
    left_out: list[str]  # raters
    answers: list[SimpleNamespace]  # that count


def count(
    study: Study, key: dict, most_failed: float = MOST_FAILED, exclude: Sequence[str] = ()
) -> Counted:
    """Return the answers that count: to pairs that are no checks, of the raters who did not fail
    more than this share of their checks and are not in ``exclude``.

    Raises ValueError for an unknown rater.
    """
    questions = list(study.questions)
    check_answers(study)
    given = judgements(study, key["pairs"])
    checks: dict[str, list[bool]] = {j.rater: [] for j in given}
    for j in given:
        if j.kind != "pair" and j.dimension == questions[-1]:
            checks[j.rater].append(j.is_failed)
    unknown = [name for name in exclude if name not in checks]
    if unknown:
        raise ValueError(
            f"--exclude must name raters with answers, {', '.join(checks) or 'none'}, got "
            f"{', '.join(unknown)}; correct the names"
        )
    left_out = [
        rater
        for rater, failed in checks.items()
        if rater in exclude or sum(failed) > most_failed * len(failed)
    ]
    answers = [
        j
        for j in given
        if j.kind == "pair" and j.rater not in left_out and j.dimension in questions
    ]
    return Counted(given, checks, left_out, answers)


def analyze(study: Study, most_failed: float, exclude: Sequence[str] = ()) -> str:
    """Write table3, pairs.csv and the analysis, without the raters ``exclude``; return its text.

    Raises ValueError for an unknown rater, and if no answers remain.
    """
    if not 0 <= most_failed <= 1:
        raise ValueError(f"--most_failed must be a share from 0 to 1, got {most_failed}")
    key = read_key(study)
    questions = list(study.questions)
    counted = count(study, key, most_failed, exclude)
    if not counted.answers:
        excluded = (
            f"excluded for failing more than {most_failed:.0%} of their checks: "
            f"{', '.join(counted.left_out) or 'none'}"
        )
        raise ValueError(f"no answers to {', '.join(questions)} remain; raters {excluded}")
    by_question = {name: [j for j in counted.answers if j.dimension == name] for name in questions}
    by_name = {
        name: question_results(answers, key["methods"])
        for name, answers in by_question.items()
        if answers
    }
    general = {
        "methods": key["methods"],
        "most_failed": most_failed,
        "checks": counted.checks,
        "left_out": counted.left_out,
        "one_sided": one_sided(counted.given, questions[-1]),
    }
    return _write_results(study.folder, general | {"questions": by_name}, counted.answers)


def _write_results(folder: Path, results: dict, counted: list[SimpleNamespace]) -> str:
    """Write the files of an analysis and return the text of analysis.md."""
    text = tables.analysis_md(results, counted)
    questions = results["questions"]
    files = {
        "analysis.json": json.dumps(results, indent=1, allow_nan=False),
        PAIRS_FILE: tables.pairs_csv(counted),
        "table3.md": tables.table3_md(questions, counted) + "\n",
        "table3.csv": tables.table3_csv(questions),
        "table3.tex": tables.table3_tex(questions, counted) + "\n",
        "analysis.md": text + "\n",
    }
    for name, content in files.items():
        with publish(folder / name) as path:
            path.write_text(content, encoding="utf-8")
    return text
