"""Table 2: evaluations of finished runs and the base model, the table, and differences between its
rows.

    <out>/cells/<run>/                            runs of post_train.py
    <out>/logs/<run>.log                          their output
    <out>/scores/<run>.json, base.json            evaluations
    <out>/table2.md, .csv, .tex, comparisons.md

Comparisons are between rows that differ in one setting: SAGE-GRPO and another sampler, equalizer on
and off, or two trust regions.
"""

import itertools
from contextlib import closing
from dataclasses import replace

import numpy as np

from hyvideo.generation.policy_scores import Evaluator
from hyvideo.records.run_files import write_text
from hyvideo.settings.reward_settings import REWARD_PRESETS
from hyvideo.validation.scores_file import Evaluation
from hyvideo.weights.weight_files import truncate
from studies.recipes.runs import RecipeRun, RecipeStudy, finished
from studies.tables.cells import KL_FLAGS, SETTINGS, Cell
from studies.tables.comparisons import (
    NO_CORRECTION,
    RecipeComparison,
    Scores,
    as_markdown,
    compare,
    intervals,
)
from studies.tables.table import Row, Table, format_seeds, write_table

UNSEEN = ", unseen prompts"  # ending of columns over the prompts that are no training prompts
SCORES = (
    "Overall",
    f"Overall{UNSEEN}",
    "VQ",
    "MQ",
    "TA",
    "CLIPScore",
    "PickScore",
    "True reward",
    "Frechet distance",
)
COMPARED = ("Reward", f"Reward{UNSEEN}", "True reward", "Frechet distance")
NOTES = (
    "Differences are the first minus the second, paired by training seed, prompt and noise, over "
    "the seeds that both have, with 95 % intervals (Student's t) over seeds and prompts (Fréchet "
    "distance: over seeds).",
    "The verdict is on the reward and needs two seeds: higher or lower if the interval excludes 0. "
    f"{NO_CORRECTION}",
)


def evaluate_runs(
    study: RecipeStudy, runs: list[RecipeRun]
) -> tuple[Evaluation, dict[RecipeRun, Evaluation]]:
    """Return the evaluations of the base model and of the finished runs; those not stored yet are
    computed.
    """
    checkpoints = {"base": None} | {
        run.name: checkpoint for run, checkpoint in finished(study, runs).items()
    }
    with closing(Evaluator(study.evaluation_config())) as evaluator:
        evaluations = evaluator.policies(checkpoints, study.out / "scores")
    return evaluations["base"], {
        run: evaluations[run.name] for run in runs if run.name in evaluations
    }


def write_results(study: RecipeStudy, runs: list[RecipeRun]) -> None:
    """Evaluate the finished runs and write the table and the comparisons."""
    base, evaluations = evaluate_runs(study, runs)
    write_table(table_of(base, runs, evaluations), study.out / "table2")
    write_text(
        study.out / "comparisons.md", as_markdown(comparisons_of(evaluations), COMPARED, NOTES)
    )


def scores_of(evaluation: Evaluation, setting: str) -> Scores:
    """Return scores of a policy and its rewards under a setting; a prompt with a missing score has
    none.
    """
    prompts = np.array([entry["group"] for entry in evaluation.videos])
    seen = np.array([entry.get("seen", True) for entry in evaluation.videos])

    def mean(values: np.ndarray) -> np.ndarray:
        return np.array([values[prompts == prompt].mean() for prompt in np.unique(prompts)])

    def scores(name: str) -> np.ndarray:
        return np.array([entry.get(name) for entry in evaluation.videos], dtype=float)  # (videos,)

    weights = REWARD_PRESETS[setting].items()
    videos = {
        name: scores(name) for name in ("Overall", "VQ", "MQ", "TA", "CLIPScore", "PickScore")
    }
    videos["Reward"] = sum(weight * scores(name) for name, weight in weights)
    videos["True reward"] = sum(weight * scores(f"true/{name}") for name, weight in weights)
    videos |= {
        f"{name}{UNSEEN}": np.where(seen, np.nan, videos[name]) for name in ("Overall", "Reward")
    }
    distance = np.array([evaluation.measures.get("frechet_distance")], dtype=float)
    return {name: mean(values) for name, values in videos.items()} | {"Frechet distance": distance}


def by_row(evaluations: dict[RecipeRun, Evaluation]) -> dict[Cell, dict[str, dict[int, Scores]]]:
    """Return scores by row (a cell without its setting), then by setting and seed."""
    rows: dict[Cell, dict[str, dict[int, Scores]]] = {}
    for run, evaluation in evaluations.items():
        cell = run.recipe
        by_setting = rows.setdefault(replace(cell, setting=""), {})
        by_setting.setdefault(cell.setting, {})[run.seed] = scores_of(evaluation, cell.setting)
    return rows


def table_of(
    base: Evaluation, runs: list[RecipeRun], evaluations: dict[RecipeRun, Evaluation]
) -> Table:
    """Return the table of all planned runs; runs without an evaluation are only listed in its
    notes.
    """
    settings = list(dict.fromkeys(run.recipe.setting for run in runs))
    rows = [
        _row(
            ["Base model", "", ""],
            "",
            {setting: [scores_of(base, setting)] for setting in settings},
        )
    ]
    counts = set()
    for cell, by_setting in by_row(evaluations).items():
        num_seeds = [len(by_setting.get(setting, ())) for setting in settings]
        counts |= {count for count in num_seeds if count}
        scores = {setting: list(by_setting.get(setting, {}).values()) for setting in settings}
        rows.append(
            _row(list(cell.labels), " / ".join(dict.fromkeys(map(format_seeds, num_seeds))), scores)
        )
    unfinished = truncate([run.name for run in runs if run not in evaluations])
    notes = _notes(base.videos, settings, counts, unfinished)
    return Table(["Method", "KL", "Equalizer"], rows, notes)


def _notes(
    videos: list[dict], settings: list[str], num_seeds: set[int], unfinished: list[str]
) -> list[str]:
    """Return what the numbers of the table mean; ``num_seeds`` has every number of training seeds
    of a row.
    """
    weights = ", ".join(f"{name} = {SETTINGS[name]}" for name in settings)
    each = f"{len(videos)} validation videos per policy"
    if any("seen" in video for video in videos):
        unseen = [video for video in videos if not video.get("seen")]
        each += f", {len(unseen)} of them with prompts unseen in training"
    if not num_seeds:
        seeds = "no"
    elif len(num_seeds) == 1:
        seeds = f"{min(num_seeds)}"
    else:
        seeds = f"{min(num_seeds)} to {max(num_seeds)}"
    notes = [
        f"Reward settings: {weights}. {each}, with the same prompts and noise for all; means over "
        f"{seeds} training seed(s), 95 % intervals (Student's t) over seeds and prompts. Prompts "
        "with a missing score in one of a row's seeds are excluded from the row. Metrics of the "
        "whole set (Fréchet distance; lower is better) have intervals over seeds, none for one "
        "seed."
    ]
    if 1 in num_seeds:
        notes.append(
            "With one seed, the interval is over prompts and does not cover variation between "
            "training seeds."
        )
    if unfinished:
        notes.append(f"Unfinished runs, not included: {', '.join(unfinished)}.")
    return notes


def _row(labels: list[str], seeds: str, scores: dict[str, list[Scores]]) -> Row:
    found = {setting: intervals(runs) for setting, runs in scores.items()}
    places = [(setting, name) for setting in scores for name in SCORES if name in found[setting]]
    return Row(
        labels, seeds, {f"{setting}: {name}": found[setting][name] for setting, name in places}
    )


def comparisons_of(evaluations: dict[RecipeRun, Evaluation]) -> list[RecipeComparison]:
    """Compare all rows that have evaluations."""
    rows = by_row(evaluations)
    found = []
    for setting in dict.fromkeys(run.recipe.setting for run in evaluations):
        available = {
            row: by_setting[setting] for row, by_setting in rows.items() if setting in by_setting
        }
        for question, first, second in questions(list(available)):
            found.append(compare(question, available[first], available[second], setting))
    return found


def questions(rows: list[Cell]) -> list[tuple[str, Cell, Cell]]:
    """Return pairs of rows that differ in one setting, with the question that they answer, grouped
    by setting.
    """
    found = []
    ranked = sorted(
        rows,
        key=lambda row: (
            row.has_equalizer,
            list(KL_FLAGS).index(row.kl),
            row.method == "sage_grpo",
        ),
    )
    for kind, (second, first) in itertools.product(range(3), itertools.combinations(ranked, 2)):
        differing = [number for number in range(3) if first.labels[number] != second.labels[number]]
        if differing == [kind] and (kind > 0 or first.method == "sage_grpo"):
            same = [label for label in first.labels if label in second.labels]
            question = f"{first.labels[kind]} against {second.labels[kind]}, {', '.join(same)}"
            found.append((question, first, second))
    return found
