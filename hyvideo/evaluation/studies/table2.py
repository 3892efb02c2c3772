"""Table 2: evaluations of finished runs and the base model, the table, and differences between its rows.

<out>/cells/<run>/         runs of post_train.py         <out>/logs/<run>.log    their output
<out>/scores/<run>.json    evaluations; base.json        <out>/table2.md, .csv, .tex, comparisons.md

Comparisons are between rows that differ in one setting: SAGE-GRPO and another sampler, equalizer on and off, or two
trust regions.
"""

import itertools
from contextlib import closing
from dataclasses import fields
from pathlib import Path

from hyvideo.data.templates import fill
from hyvideo.evaluation.policy_scores import Evaluator
from hyvideo.evaluation.scores_file import Evaluation
from hyvideo.evaluation.studies.cells import KL_FLAGS, SETTINGS, Cell
from hyvideo.evaluation.studies.columns import FRECHET, REWARD, TRUE_REWARD, UNSEEN, Column, intervals
from hyvideo.evaluation.studies.comparisons import NO_CORRECTION, Comparison, as_markdown, compare
from hyvideo.evaluation.studies.runs import Run, Study, progress
from hyvideo.evaluation.studies.table import Row, Table, make_table, write_table
from hyvideo.models.weight_files import truncate
from hyvideo.records.run_files import write_text
from hyvideo.schedulers.transitions import sampler_of

SCORES = ("Overall", f"Overall{UNSEEN}", "VQ", "MQ", "TA", "CLIPScore", "PickScore")
COLUMNS = (*map(Column, SCORES), TRUE_REWARD, FRECHET)
COMPARED = (REWARD, Column(f"Reward{UNSEEN}"), TRUE_REWARD, FRECHET)
NOTES = (
    "Differences are the first minus the second, paired by training seed, prompt and noise, over the seeds that both "
    "have, with 95 % intervals (Student's t) over seeds and prompts (Fréchet distance: over seeds).",
    f"The verdict is on the reward and needs two seeds: higher or lower if the interval excludes 0. {NO_CORRECTION}",
)


def evaluate_runs(study: Study, runs: list[Run]) -> tuple[Evaluation, dict[Run, Evaluation]]:
    """Return the evaluations of the base model and of the finished runs; those not stored yet are computed."""
    checkpoints: dict[str, Path | None] = {"base": None}
    for run in runs:
        if checkpoint := progress(study.folder(run), study.config(run)).checkpoint:
            checkpoints[run.name] = checkpoint
    with closing(Evaluator(study.evaluation_config())) as evaluator:
        evaluations = evaluator.policies(checkpoints, study.out / "scores")
    return evaluations["base"], {run: evaluations[run.name] for run in runs if run.name in evaluations}


def write_results(study: Study, runs: list[Run]) -> None:
    """Evaluate the finished runs and write the table and the comparisons."""
    base, evaluations = evaluate_runs(study, runs)
    write_table(table_of(base, runs, evaluations), study.out / "table2")
    write_text(study.out / "comparisons.md", as_markdown(comparisons_of(evaluations), COMPARED, NOTES))


def by_row(evaluations: dict[Run, Evaluation]) -> dict[Cell, dict[str, dict[int, Evaluation]]]:
    """Group evaluations by row (a cell without setting and schedule), then by setting and seed."""
    rows: dict[Cell, dict[str, dict[int, Evaluation]]] = {}
    for run, evaluation in evaluations.items():
        cell = run.recipe
        row = rows.setdefault(Cell("", cell.method, cell.kl, cell.has_equalizer), {})
        row.setdefault(cell.setting, {})[run.seed] = evaluation
    return rows


def table_of(base: Evaluation, runs: list[Run], evaluations: dict[Run, Evaluation]) -> Table:
    """Return the table of all planned runs; runs without an evaluation are only listed in its notes."""
    settings, trained = list(dict.fromkeys(run.recipe.setting for run in runs)), by_row(evaluations)
    equalizer = ["Equalizer"] if any(not row.has_equalizer for row in trained) else []

    def row(labels: list[str], by_setting: dict[str, list[Evaluation]], num_seeds: dict[str, int]) -> Row:
        found = {setting: intervals(by_setting.get(setting, []), COLUMNS, setting) for setting in settings}
        values = {(setting, name): value for setting in settings for name, value in found[setting].items()}
        return Row(labels[: 2 + len(equalizer)], values, num_seeds)

    rows = [row(["Base model", "", ""], dict.fromkeys(settings, [base]), {})]
    for cell, by_setting in trained.items():
        labels = [sampler_of(cell.method).label, cell.kl.replace("_", " "), "yes" if cell.has_equalizer else "no"]
        seeds = {setting: len(by_setting.get(setting, ())) for setting in settings}
        rows.append(row(labels, {setting: list(by_seed.values()) for setting, by_seed in by_setting.items()}, seeds))
    groups = {setting: f"Setting {setting} ({SETTINGS[setting]})" for setting in settings}
    counts = {count for each in rows for count in each.num_seeds.values() if count}
    below = notes(settings, base, counts, [run.name for run in runs if run not in evaluations])
    return make_table(["Method", "KL", *equalizer], groups, COLUMNS, rows, below)


def notes(settings: list[str], base: Evaluation, seeds: set[int], unfinished: list[str]) -> list[str]:
    """Return notes on the numbers and on unfinished runs; ``seeds`` has the number of seeds of each row."""
    template, numbers = Path(__file__).with_name("table2_notes.txt.jinja"), {"videos": base.videos, "seeds": seeds}
    return fill(template, settings=settings, names=SETTINGS, unfinished=truncate(unfinished), **numbers).splitlines()


def comparisons_of(evaluations: dict[Run, Evaluation]) -> list[Comparison]:
    """Compare all rows that have evaluations. Raises ValueError if their prompts or noise differ."""
    rows, found = by_row(evaluations), []
    for setting in dict.fromkeys(run.recipe.setting for run in evaluations):
        available = {row: by_setting[setting] for row, by_setting in rows.items() if setting in by_setting}
        for question, first, second in questions(list(available)):
            found.append(compare(question, available[first], available[second], COMPARED, setting))
    return found


def questions(rows: list[Cell]) -> list[tuple[str, Cell, Cell]]:
    """Return pairs of rows that differ in one setting, with the question that they answer, grouped by setting."""
    by_kind: dict[str, list] = {"method": [], "has_equalizer": [], "kl": []}
    strength = list(KL_FLAGS).index
    for first, second in itertools.permutations(rows, 2):
        differing = [f.name for f in fields(Cell) if getattr(first, f.name) != getattr(second, f.name)]
        label, kl = sampler_of(first.method).label, first.kl.replace("_", " ")
        without = "" if first.has_equalizer else ", no equalizer"
        if differing == ["method"] and first.method == "sage_grpo":
            question = f"{label} against {sampler_of(second.method).label}, KL {kl}{without}"
        elif differing == ["has_equalizer"] and first.has_equalizer:
            question = f"equalizer on against off, {label}, KL {kl}"
        elif differing == ["kl"] and strength(first.kl) > strength(second.kl):
            question = f"KL {kl} against {second.kl.replace('_', ' ')}, {label}{without}"
        else:
            continue
        by_kind[differing[0]].append((question, first, second))
    return list(itertools.chain(*by_kind.values()))
