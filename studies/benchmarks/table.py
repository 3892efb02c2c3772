"""Benchmark scores of several policies, with 95 % intervals, as table.md and benchmarks.json.

benchmarks.json is {"benchmarks": [...]}, with one object per benchmark:

    title       "VBench" or "VBench-2.0"
    policies    {name: number of runs}, in order; differences are those from the first policy
    rows        a list: the total, then each category followed by its dimensions, with the keys
                name            "total", a category such as "quality", or a dimension such as "scene"
                kind            "total", "category" or "dimension"
                scores          {policy: {mean, low, high, videos}}, in %
                differences     {policy: {mean, low, high, prompts, verdict}}, in percentage points
    notes       a list of sentences to print below the table

A policy without a result is null there; low and high are null without an interval. A sum needs all
of its dimensions. The mean of a score is the official one. Intervals are over prompts and, with
several runs, over runs (`hyvideo.validation.intervals`). Dimensions share prompts, so that a
prompt's deviations in all dimensions are added first.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hyvideo.records.run_files import write_json, write_text
from hyvideo.validation.intervals import Interval, t_interval
from studies.benchmarks.results import Result, Run, by_prompt, difference
from studies.benchmarks.suites import Suite
from studies.tables.comparisons import NO_CORRECTION

# largest difference of an official score from the mean of its videos without a note
_ROUNDING = 0.005
Scores = dict[str, dict[str, float]]  # of one run, by dimension and prompt


def make_table(suite: Suite, policies: dict[str, list[Run]]) -> dict:
    """Return the table of a benchmark as in benchmarks.json.

    Raises ValueError for runs that cannot be paired.
    """
    first, *others = policies
    counts = {name: len(runs) for name, runs in policies.items()}
    if counts[first] > 1 and len(set(counts.values())) > 1:
        raise ValueError(
            f"{first} must have one run, or as many as every other policy, got {counts}"
        )
    rows = []
    for name, kind in suite.rows.items():
        factors = suite.factors(name)
        scores: dict[str, dict | None] = dict.fromkeys(policies)
        differences: dict[str, dict | None] = dict.fromkeys(others)
        for policy, runs in policies.items():
            if all(run.keys() >= factors.keys() for run in runs):
                scores[policy] = _score(suite, name, runs)
        for policy in others:
            if scores[first] and scores[policy]:
                before = policies[first] * (counts[policy] // counts[first])
                differences[policy] = _difference(factors, list(zip(before, policies[policy])))
        rows.append({"name": name, "kind": kind, "scores": scores, "differences": differences})
    notes = list(dict.fromkeys(_notes(suite, policies)))  # runs of a policy may have equal notes
    return {"title": suite.title, "policies": counts, "rows": rows, "notes": notes}


def _notes(suite: Suite, policies: dict[str, list[Run]]) -> list[str]:
    """Return what the numbers mean, and what the results of a policy lack or do not show."""
    notes = [
        "Official scores in %, with 95 % intervals over prompts; differences are paired by prompt "
        "and seed.",
    ]
    for policy, runs in policies.items():
        if len(runs) == 1:
            notes.append(
                f"{policy} has one run: its intervals do not cover the variation between training "
                "runs."
            )
        missing = []
        for name, dimension in suite.dimensions.items():
            if any(name not in run for run in runs):
                missing.append(name)
            for run in runs:
                if name in run:
                    notes += _notes_on(
                        run[name], policy, name, is_renumbered=dimension.is_renumbered
                    )
        if missing:
            notes.append(
                f"{policy} has no result for {', '.join(missing)}; sums that need them are "
                "missing, not 0."
            )
    return [*notes, NO_CORRECTION]


def _notes_on(result: Result, policy: str, name: str, *, is_renumbered: bool) -> list[str]:
    """Return notes on the result of a policy in the dimension ``name``."""
    notes = []
    if result.num_dropped:
        notes.append(
            f"{policy}: the benchmark did not count {result.num_dropped} of "
            f"{result.num_dropped + result.num_videos} videos of {name}; a difference needs both "
            "videos."
        )
    if is_renumbered and not result.is_filtered:
        notes.append(
            f"{policy}: {name} was measured without the static filter, so it also rewards still "
            "videos."
        )
    mean = sum(result.videos.values()) / len(result.videos)
    if abs(mean - result.score) > _ROUNDING:
        notes.append(
            f"{policy}: {name} is {result.score:.4f}, but its videos have a mean of {mean:.4f}."
        )
    return notes


def write_tables(folder: Path, tables: list[dict]) -> str:
    """Write table.md and benchmarks.json, and return the text of the former."""
    text = "\n\n".join(as_markdown(table) for table in tables) + "\n"
    write_text(folder / "table.md", text)
    write_json(folder / "benchmarks.json", {"benchmarks": tables})
    return text


def as_markdown(table: dict) -> str:
    """Format a table in the form of benchmarks.json, with its notes as a list."""
    first, *others = table["policies"]
    names = [_escaped(name) for name in table["policies"]]
    names += [f"{_escaped(name)} - {_escaped(first)}" for name in others]
    rows = [[f"{table['title']} (%)", *names], ["---"] * (1 + len(names))]
    for row in table["rows"]:
        label = row["name"] if row["kind"] == "dimension" else f"**{row['name']}**"
        scores = [_cell(row["scores"][name], "") for name in table["policies"]]
        differences = [_cell(row["differences"][name], "+") for name in others]
        rows.append([label, *scores, *differences])
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    notes = [f"- {note}" for note in table["notes"]]
    return "\n".join([*lines, "", *notes])


def _escaped(name: str) -> str:
    return name.replace("|", "\\|")


def _cell(values: dict | None, sign: str) -> str:
    """Format the mean with its interval and, for a difference, which has the sign "+", its
    verdict.
    """
    if not values or values["mean"] is None:
        return "-"
    text = f"{values['mean']:{sign}.2f}"
    if values["low"] is not None:
        text += f" [{values['low']:{sign}.2f}, {values['high']:{sign}.2f}]"
    return f"{text} {values['verdict']}" if sign else text


def prompt_values(runs: Sequence[Scores], factors: dict[str, float]) -> np.ndarray:
    """Return a value per run and prompt; their mean is the sum of the dimensions' means times their
    factors.

    A prompt's value is that mean, plus its deviations from the dimensions' means, times factor and
    all prompts / those of the dimension: the values vary like a sum over independent prompts. Only
    prompts that all runs have count. Shape: (runs, prompts).
    """
    common = {name: sorted(set.intersection(*(set(run[name]) for run in runs))) for name in factors}
    rows = {prompt: row for row, prompt in enumerate(sorted(set().union(*common.values())))}
    values = np.zeros((len(runs), len(rows)))
    for name, factor in factors.items():
        scores = np.array([[run[name][prompt] for prompt in common[name]] for run in runs])
        mean = scores.mean(1, keepdims=True)
        count = len(common[name])
        total = len(rows)
        # The root makes the variance of the dimension's mean the unbiased one, whatever its share
        # of the prompts.
        spread = 1.0
        if count > 1:
            spread = total / count * math.sqrt(count / (count - 1) * (total - 1) / total)
        values += factor * mean
        values[:, [rows[prompt] for prompt in common[name]]] += factor * spread * (scores - mean)
    return values


def _interval(runs: Sequence[Scores], factors: dict[str, float]) -> Interval:
    """Return a sum in %; NaN without common prompts, and no interval if a dimension has one of
    several prompts.
    """
    least = min(len(set.intersection(*(set(run[name]) for run in runs))) for name in factors)
    if not least:
        return Interval(math.nan, math.nan, math.nan)
    found = t_interval(100 * prompt_values(runs, factors))
    if least == 1 and len(factors) > 1:
        return Interval(found.mean, math.nan, math.nan)
    return found


def _score(suite: Suite, name: str, runs: list[Run]) -> dict[str, float | None]:
    factors = suite.factors(name)
    found = _interval(
        [{each: by_prompt(run[each].videos) for each in factors} for run in runs], factors
    )
    official = 100 * float(
        np.mean([suite.score(name, {each: run[each].score for each in factors}) for run in runs])
    )
    moved = Interval(
        official, found.low + official - found.mean, found.high + official - found.mean
    )
    return _within(moved, 0.0, 100.0).as_json() | {
        "videos": sum(run[each].num_videos for run in runs for each in factors)
    }


def _within(interval: Interval, least: float, most: float) -> Interval:
    """Return an interval without values that no mean can have; a t interval of few prompts contains
    some.
    """
    low = max(interval.low, min(least, interval.mean))
    high = min(interval.high, max(most, interval.mean))
    return Interval(interval.mean, low, high)


def _difference(
    factors: dict[str, float], pairs: list[tuple[Run, Run]]
) -> dict[str, float | str | None]:
    runs = [
        {name: difference(before[name], after[name]) for name in factors} for before, after in pairs
    ]
    found = _within(_interval(runs, factors), -100.0, 100.0)
    verdict = "no significant difference" if math.isfinite(found.low) else "no interval"
    if found.excludes_zero:
        verdict = "higher" if found.mean > 0 else "lower"
    prompts = {prompt for run in runs for scores in run.values() for prompt in scores}
    return found.as_json() | {"prompts": len(prompts), "verdict": verdict}
