"""What recipes reached with a budget: curves over what they spent, a Pareto picture, a table and verdicts.

All is read from the runs' own validations, in metrics.jsonl and, of the base, in samples/000000. Between two of them a
measure is taken to change evenly. Seconds are those of iterations, times the processes of a run: without its start,
its validations and its checkpoints.
"""

import json
from dataclasses import dataclass

import numpy as np

from hyvideo.config.run_plan import make_plan
from hyvideo.data.outside import parse_json
from hyvideo.evaluation.scores_file import Evaluation, finite_or_none
from hyvideo.evaluation.studies.columns import FRECHET, Column, intervals
from hyvideo.evaluation.studies.comparisons import EACH_BY_ITSELF, as_markdown, compare
from hyvideo.evaluation.studies.intervals import Interval
from hyvideo.evaluation.studies.recipe_pictures import draw_curves, draw_pareto
from hyvideo.evaluation.studies.recipes import AXES, Budget
from hyvideo.evaluation.studies.runs import Run, Study
from hyvideo.evaluation.studies.study_command import finished
from hyvideo.evaluation.studies.table import Row, make_table, write_table
from hyvideo.grpo.metrics import DIMENSIONS
from hyvideo.records.metrics_file import whole_lines
from hyvideo.records.run_files import write_text

COMPARED = (
    Column("Reward", of_set="reward"),
    Column("True reward", of_set="true/reward"),
    FRECHET,
    Column("Diversity", of_set="held_out/diversity"),
)
COLUMNS = (*COMPARED, *(Column(name, of_set=name) for name in DIMENSIONS))
SPENT = tuple(Column(axis, of_set=axis) for axis in AXES)
HEADS = ["Recipe", "Rollouts", "Forwards each", "Forwards", "Seconds"]


@dataclass(frozen=True)
class Trace:
    """What a run had spent at each of its validations, and what they measured; NaN where nothing was."""

    values: dict[str, np.ndarray]  # by axis and by measure; (validations,)

    def at(self, axis: str, amount: float) -> Evaluation:
        """What was measured where so much was spent; where the run had spent less in all, at its end."""
        found = {name: np.interp(amount, self.values[axis], values) for name, values in self.values.items()}
        return Evaluation([], {name: finite_or_none(float(value)) for name, value in found.items()})


def read_trace(study: Study, run: Run) -> Trace:
    """What a run left of its validations. Raises ValueError for one without any."""
    config, folder = study.config(run), study.folder(run)
    rollouts, spent, points = make_plan(config, study.world_size).rollouts, np.zeros(3), []
    base = folder / "samples/000000/measures.json"
    if base.is_file():
        points.append(dict(zip(AXES, spent)) | parse_json(base.read_text(encoding="utf-8")))
    for _, text in whole_lines(folder / "metrics.jsonl"):
        line = json.loads(text)
        spent = spent + [rollouts, rollouts * line["cost/forwards"], line["time/iteration"] * study.world_size]
        if "validation/reward" in line:
            points.append(dict(zip(AXES, spent)) | {k.removeprefix("validation/"): v for k, v in line.items()})
    for point in points:
        truths = [point.get(f"true/{name}") for name in config.reward_weights]
        if None not in truths:
            point["true/reward"] = np.dot(truths, [*config.reward_weights.values()])
    names = [column.of_set for column in (*SPENT, *COLUMNS)]
    return Trace({name: np.array([point.get(name) for point in points], dtype=float) for name in names})


def curve(traces: list[Trace], axis: str, end: float = np.inf) -> list[dict[str, Interval]]:
    """Means and intervals over seeds, by column, at the validations of the first seed, as far as ``end`` and there."""
    amounts = traces[0].values[axis]
    amounts = [*amounts[amounts < end], end] if end < amounts[-1] else amounts
    return [intervals([trace.at(axis, amount) for trace in traces], (*SPENT, *COLUMNS)) for amount in amounts]


def write_results(study: Study, runs: list[Run], budget: Budget) -> None:
    """Writes what the finished runs reached: recipes.md, .csv and .tex, verdicts.md, curves_<axis>.png, pareto.png."""
    traces: dict[str, dict[int, Trace]] = {run.recipe.name: {} for run in runs}
    for run in finished(study, runs):
        traces[run.recipe.name][run.seed] = read_trace(study, run)
    traces = {name: of_recipe for name, of_recipe in traces.items() if of_recipe}
    if not traces:
        raise ValueError(f"{study.out} has no finished run yet")
    for axis in AXES:
        end = budget.amount if axis == budget.axis else np.inf
        curves = {name: curve([*of_recipe.values()], axis, end) for name, of_recipe in traces.items()}
        draw_curves(curves, axis, [column.name for column in COMPARED], study.out / f"curves_{axis}.png")
        if axis == budget.axis:
            draw_pareto(curves, study.out / "pareto.png")
            rows = [_row(name, points[-1], len(traces[name])) for name, points in curves.items()]
            first = next(iter(curves.values()))[0]
    base = [_row("Base model", first, 0)] if not first["rollouts"].mean else []
    missing = [run.name for run in runs if run.seed not in traces.get(run.recipe.name, {})]
    notes = [
        f"At {budget.amount:,} {budget.axis} a run, or its end before that; measured by the runs' own validations, "
        "on the same prompts and noise. 95 % interval of Student's t over training seeds, none for one seed.",
        *([f"Without a finished run, and not in the means: {', '.join(missing)}."] if missing else []),
    ]
    write_table(make_table(HEADS, {"": ""}, COLUMNS, base + rows, notes), study.out / "recipes")
    ends = {n: {seed: t.at(budget.axis, budget.amount) for seed, t in of.items()} for n, of in traces.items()}
    (against, firsts), *others = ends.items()
    verdicts = [compare(f"{name} against {against}", seeds, firsts, COMPARED) for name, seeds in others]
    said = ["Differences paired by training seed, 95 % interval of Student's t over seeds. " + EACH_BY_ITSELF]
    write_text(study.out / "verdicts.md", as_markdown(verdicts, COMPARED, said))


def _row(name: str, end: dict[str, Interval], num_seeds: int) -> Row:
    rollouts, forwards, seconds = (end[column.name].mean for column in SPENT)
    each = f"{forwards / rollouts:.4g}" if rollouts else ""
    labels = [name, f"{rollouts:.0f}", each, f"{forwards:.0f}", f"{seconds:.0f}"]
    return Row(labels, {("", c): value for c, value in end.items()}, {"": num_seeds} if num_seeds else {})
