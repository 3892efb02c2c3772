"""Results of recipes at equal cost: curves over the cost, a Pareto plot, a table and verdicts.

Metrics come from the validations of the runs, in metrics.jsonl and, for the base model, in
samples/000000. They are interpolated linearly between validations. Seconds are those of the
iterations, decoding and scoring included, without startup, validations and checkpoints: the wall
time of the processes, or on a CPU their CPU time, which does not depend on the machine's load.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import matplotlib

from hyvideo.settings.reward_settings import reward_weights

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from hyvideo.data.prompts import read_requests
from hyvideo.files.files import read_json
from hyvideo.files.run_folder import METRICS, SAMPLES
from hyvideo.files.yaml_files import read_yaml
from hyvideo.generation.policy_scores import Evaluator
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.records.metrics_file import read_metrics
from hyvideo.records.run_files import write_text
from hyvideo.rewards.rewards import DIMENSIONS
from hyvideo.settings.config import Config
from hyvideo.settings.iteration_plan import make_plan
from hyvideo.validation.held_out import MEASURES_FILE
from hyvideo.validation.intervals import Interval
from hyvideo.validation.scores_file import summarise, write_csv
from hyvideo.validation.validation import conditions_of
from studies.recipes.confounders import (
    confounder,
    describe_differences,
    differing_settings,
    has_guided_anchor,
)
from studies.recipes.recipes import AXES, Budget
from studies.recipes.runs import RecipeRun, RecipeStudy, finished
from studies.recipes.train_runs import planned
from studies.tables.comparisons import NO_CORRECTION, Scores, as_markdown, compare, intervals
from studies.tables.table import Row, Table, format_seeds, write_table

Trace = dict[str, np.ndarray]  # cost and metrics of a run at each validation; (validations,)
Point = dict[str, Interval]  # cost and metrics of a recipe at one cost, over its seeds

COLUMNS = 3  # panels beside each other in a figure
COMPARED = {  # names in the metrics, and columns
    "reward": "Reward",
    "seen/reward": "Reward, seen prompts",
    "unseen/reward": "Reward, unseen prompts",
    "true/reward": "True reward",
    "frechet_distance": "Frechet distance",
    "held_out/diversity": "Diversity",
}


def environment_of(study: RecipeStudy, run: RecipeRun) -> dict:
    """Return the environment in which a run was trained."""
    return read_yaml(study.folder(run) / "config.yaml")["environment"]


def read_trace(study: RecipeStudy, run: RecipeRun) -> Trace:
    """Read the validations of a run; values that were not measured are NaN.

    Raises ValueError if its records lack an iteration, whose cost would be missing.
    """
    config = study.config(run)
    folder = study.folder(run)
    spent = np.zeros(len(AXES))
    points = []
    environment = environment_of(study, run)
    processes = environment["processes"]
    clock = "time/cpu" if environment["device"] == "cpu" else "time/iteration"
    rollouts = make_plan(config, processes).rollouts
    base = folder / "samples/000000/measures.json"
    if base.is_file():
        points.append(dict(zip(AXES, spent)) | read_json(base, run.name))
    lines = read_metrics(folder / METRICS)
    missing = set(range(1, 1 + len(lines))) - {line["iteration"] for line in lines}
    if missing:
        raise ValueError(
            f"{folder / METRICS} has no line of iteration {min(missing)}, so that the cost of the "
            "run is unknown; restore the line, or move the folder away to train the run again"
        )
    for line in lines:
        spent = spent + [
            rollouts,
            rollouts * line["cost/forwards"],
            line[clock] * processes,
        ]
        if "validation/reward" in line:
            metrics = {name.removeprefix("validation/"): value for name, value in line.items()}
            points.append(dict(zip(AXES, spent)) | metrics)
    return _columns(points, reward_weights(config.reward))


def check_validations(study: RecipeStudy, runs: Iterable[RecipeRun]) -> None:
    """Raise ValueError if a validation of the runs was made with other prompts or settings than
    those of the study, so that its metrics cannot be compared with those of the other runs.
    """
    for run in runs:
        expected: dict | None = None
        for file in sorted(study.folder(run).glob(f"{SAMPLES}/*/{MEASURES_FILE}")):
            made_with = read_json(file, run.name)["made_with"]
            if expected is None:
                config = study.config(run)
                requests = read_requests(*config.data.valid_video_csv)
                expected = json.loads(json.dumps(conditions_of(config, requests)))
            changes = [
                _change(name, made_with.get(name), expected.get(name))
                for name in {**expected, **made_with}
                if name != "base_weight_dtype" and made_with.get(name) != expected.get(name)
            ]
            if changes:
                raise ValueError(
                    "the runs of a study must be validated with the same prompts and settings, "
                    f"but {file} has {' and '.join(changes)}; restore the settings and prompts of "
                    "the study, use another --output_dir, or move the folder of this run away to "
                    "train it again"
                )


def _change(name: str, value: object, expected: object) -> str:
    if name == "prompts":
        return "other prompts than valid_video_csv"
    return f"{name} {value} instead of {expected}"


def _columns(points: list[dict], weights: Mapping[str, float]) -> Trace:
    """Return costs and metrics by column, with the weighted sum of the true rewards."""
    names = {
        **{name: name for name in AXES},
        **COMPARED,
        **{name: name for name in (*DIMENSIONS, *weights)},
    }
    trace = {
        column: np.array([point.get(name) for point in points], dtype=float)
        for name, column in names.items()
    }
    truths = [
        np.array([point.get(f"true/{name}") for point in points], dtype=float) for name in weights
    ]
    return trace | {"True reward": np.dot(list(weights.values()), truths)}


def guided_base(study: RecipeStudy, run: RecipeRun, scale: float) -> Scores:
    """Return the metrics of the base model with guidance in the validation of a run; stored in
    scores/.
    """
    config = study.config(run).with_settings(validation_cfg_scale=scale)
    with closing(Evaluator(config)) as evaluator:
        (evaluation,) = evaluator.policies(
            {f"base-guided-{scale:g}": None}, study.out / "scores"
        ).values()
    values = {name: value.mean for name, value in summarise(evaluation).items()}
    for kind, is_seen in (("seen", True), ("unseen", False)):
        rewards = [entry["reward"] for entry in evaluation.videos if entry.get("seen") is is_seen]
        rewards = [reward for reward in rewards if reward is not None]
        if rewards:
            values[f"{kind}/reward"] = np.mean(rewards)
    return _columns([dict.fromkeys(AXES, 0.0) | values], reward_weights(config.reward))


def at_cost(trace: Trace, axis: str, amount: float) -> Scores:
    """Return the metrics of a run at the given cost, or at its end if it cost less."""
    return {name: np.interp([amount], trace[axis], values) for name, values in trace.items()}


def curve(traces: list[Trace], axis: str, end: float = np.inf) -> list[Point]:
    """Return means and intervals over seeds at the validations of the first seed up to ``end``, and
    at ``end``.
    """
    amounts = traces[0][axis]
    if end < amounts[-1]:
        amounts = [*amounts[amounts < end], end]
    return [intervals([at_cost(trace, axis, amount) for trace in traces]) for amount in amounts]


def write_results(
    study: RecipeStudy, runs: list[RecipeRun], budget: Budget, guidance: float | None = None
) -> None:
    """Write the results of the finished runs: recipes.md, .csv, .tex, seeds.csv, verdicts.md,
    curves_<axis>.png and pareto.png.

    With ``guidance``, the table also has the base model with this guidance scale.
    """
    trained = list(finished(study, runs))
    if not trained:
        raise ValueError(f"{study.out} contains no finished run yet")
    check_validations(study, trained)
    # in the order of the recipes, also if the first seed of the first recipe is not finished
    names = dict.fromkeys(run.recipe.name for run in runs)
    traces: dict[str, dict[int, Trace]] = {}
    for name in names:
        of_recipe = [run for run in trained if run.recipe.name == name]
        if of_recipe:
            traces[name] = {run.seed: read_trace(study, run) for run in of_recipe}
    scores = {
        name: {seed: at_cost(t, *budget) for seed, t in by_seed.items()}
        for name, by_seed in traces.items()
    }
    ends = {name: intervals(list(by_seed.values())) for name, by_seed in scores.items()}
    base = intervals([at_cost(traces[trained[0].recipe.name][trained[0].seed], budget.axis, 0)])
    write_plots(traces, ends, base, budget, study.out)
    whole = planned(study, trained[0], trains=False)
    rows = []
    if not base["rollouts"].mean:  # the first validation is that of the base model
        rows.append(_row("Base model", base, forwards_per_video(whole), ""))
    if guidance:
        guided = intervals([guided_base(study, trained[0], guidance)])
        of_video = forwards_per_video(whole.with_settings(validation_cfg_scale=guidance))
        rows.append(_row(f"Base model, guidance {guidance:g}", guided, of_video, ""))
    rows += [
        _row(name, e, forwards_per_video(whole), format_seeds(len(scores[name])))
        for name, e in ends.items()
    ]
    notes = [
        f"At {budget.amount:,} {budget.axis} per run, or at its end if earlier; from the "
        "validations of the runs, with the same prompts and noise. 95 % intervals (Student's t) "
        "over training seeds, none for one seed.",
    ]
    missing = [run.name for run in runs if run not in trained]
    if missing:
        notes.append(f"Unfinished runs, not included: {', '.join(missing)}.")
    is_on_cpu = environment_of(study, trained[0])["device"] == "cpu"
    seconds = "CPU seconds" if is_on_cpu else "GPU seconds"
    heads = ["Recipe", "Rollouts", "Forwards", seconds, "Forwards a rollout", "Forwards a video"]
    write_table(Table(heads, rows, notes), study.out / "recipes")
    write_csv(study.out / "seeds.csv", seed_rows(scores))
    controls = {run.recipe.control_of: run.recipe.name for run in trained if run.recipe.control_of}
    configs = {run.recipe.name: study.config(run) for run in trained}
    costs = {
        name: {"Forwards": f"{end['forwards'].mean:,.0f}", seconds: f"{end['seconds'].mean:,.0f}"}
        for name, end in ends.items()
    }
    baseline = runs[0].recipe.name
    write_verdicts(scores, controls, configs, costs, study.out / "verdicts.md", baseline=baseline)


def seed_rows(scores: Mapping[str, Mapping[int, Scores]]) -> Iterator[dict[str, str | int]]:
    """Yield the results of each run as a row of a table of seeds (`studies.tables.seed_table`)."""
    for name, by_seed in scores.items():
        for seed, values in by_seed.items():
            row: dict[str, str | int] = {"recipe": name, "seed": seed}
            for column, value in values.items():
                is_known = np.isfinite(value).all()
                row[_metric_name(column)] = f"{value.item():.6g}" if is_known else ""
            yield row


def _metric_name(column: str) -> str:
    """Return the name of a column in a table of seeds: ``true_reward`` of ``True reward``."""
    return column.lower().replace(",", "").replace(" ", "_")


def write_plots(
    traces: dict[str, dict[int, Trace]],
    ends: dict[str, Point],
    base: Point,
    budget: Budget,
    folder: Path,
) -> None:
    """Draw the curves over each cost up to the budget, and the ends of the recipes beside the first
    validation.
    """
    for axis in AXES:
        end = budget.amount if axis == budget.axis else np.inf
        curves = {
            name: curve(list(by_seed.values()), axis, end) for name, by_seed in traces.items()
        }
        draw(curves, itertools.product([axis], COMPARED.values()), folder / f"curves_{axis}.png")
    has_truth = all("True reward" in end for end in ends.values())
    reward = "True reward" if has_truth else "Reward"
    panels = [("Frechet distance", reward), ("Diversity", reward)]
    draw(
        {name: [end] for name, end in ends.items()} | {"first validation": [base]},
        panels,
        folder / "pareto.png",
    )


def questions(
    names: list[str], controls: dict[str, str], configs: dict[str, Config], *, baseline: str
) -> list[tuple[str, str]]:
    """Return the pairs of recipes to compare: each with the ``baseline`` and with its control, by
    name in ``controls``, and the control of a guided anchor with the baseline, because their
    difference is what the anchor gains.
    """
    pairs = []
    if baseline in names:
        others = [name for name in names if name not in (baseline, *controls.values())]
        pairs = [(name, baseline) for name in others]
        pairs += [
            (control, baseline)
            for name, control in controls.items()
            if name in others
            and has_guided_anchor(configs[name])
            and not has_guided_anchor(configs[baseline])
        ]
    return pairs + [pair for pair in controls.items() if pair[0] in names]


def write_verdicts(
    scores: dict[str, dict[int, Scores]],
    controls: dict[str, str],  # of the finished ones, by the recipe that they repeat
    configs: dict[str, Config],
    costs: dict[str, dict[str, str]],  # by recipe, then by column
    path: Path,
    *,
    baseline: str,
) -> None:
    """Compare the pairs of `questions`, and list the settings in which they differ."""
    notes = [
        "Differences are paired by training seed, with 95 % intervals (Student's t) over seeds. "
        + NO_CORRECTION
    ]
    if baseline not in scores:
        notes.append(f"No run of {baseline} is finished, so nothing is compared with this recipe.")
    verdicts = []
    differing = []
    for pair in questions(list(scores), controls, configs, baseline=baseline):
        name, other = pair
        question = f"{name} against {other}"
        both = (configs[name], configs[other])
        reason = confounder(pair, both, {*controls, *controls.values()})
        verdict = compare(question, scores[name], scores[other])
        of_both = {
            column: f"{costs[name][column]}, {costs[other][column]}" for column in costs[name]
        }
        verdicts.append(replace(verdict, confounder=reason, costs=of_both))
        if reason:
            notes.append(f"**{question} is confounded**: {reason}.")
        differing.append(f"- {question}: {describe_differences(differing_settings(*both))}")
    if differing:
        notes += ["", "The recipes differ in these settings:", "", *differing]
    write_text(path, as_markdown(verdicts, COMPARED.values(), notes))


def forwards_per_video(run: PlannedRun) -> float:
    """Return the forward passes to sample a validation video."""
    return run.validation.plan.sampled_branches * run.validation.settings.grpo_sampling_steps


def _row(name: str, end: Point, of_video: float, seeds: str) -> Row:
    rollouts, forwards, seconds = (end[axis].mean for axis in AXES)
    each = f"{forwards / rollouts:.4g}" if rollouts else ""
    labels = [
        name,
        *(f"{amount:.0f}" for amount in (rollouts, forwards, seconds)),
        each,
        f"{of_video:g}",
    ]
    return Row(
        labels, seeds, {column: value for column, value in end.items() if column not in AXES}
    )


def draw(curves: dict[str, list[Point]], panels: Iterable[tuple[str, str]], path: Path) -> None:
    """Draw a panel for each pair of columns that all curves have: the second over the first, with
    their intervals.
    """
    panels = [
        pair
        for pair in panels
        if all(point.keys() >= set(pair) for points in curves.values() for point in points)
    ]
    if not panels:
        return
    rows = math.ceil(len(panels) / COLUMNS)
    columns = min(len(panels), COLUMNS)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(4.8 * columns + 1.6, 4.4 * rows),
        squeeze=False,
        layout="constrained",
    )
    for axes, names in itertools.zip_longest(grid.flat, panels):
        if names is None:  # the last row has fewer panels
            axes.remove()
            continue
        ends = []
        for number, (recipe, points) in enumerate(curves.items()):
            x, y = (
                np.array([(p[name].mean, p[name].low, p[name].high) for p in points]).T
                for name in names
            )
            ends.append((x, y))
            axes.errorbar(
                x[0],
                y[0],
                yerr=abs(y[1:] - y[0]),
                xerr=abs(x[1:] - x[0]),
                color=f"C{number % 10}",
                linestyle=("-", "--", ":")[number % 3],
                marker=".",
                elinewidth=0.8,
                capsize=2,
                label=recipe,
            )
        all_x, all_y = (np.concatenate(values, axis=1) for values in zip(*ends))
        axes.set(xlabel=names[0], ylabel=names[1], xlim=axis_of(all_x), ylim=axis_of(all_y))
        axes.grid(alpha=0.3)
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize="small"
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def axis_of(values: np.ndarray) -> tuple[float | None, float | None]:
    """Return the ends of an axis with all means, and with their intervals as far as three times the
    range of the means: the interval of two seeds may be a thousand times as long. None for equal
    means, where matplotlib chooses the ends.

    ``values`` are means and ends of intervals, NaN if they are not known. Shape: (3, points).
    """
    means = values[0, np.isfinite(values[0])]
    if len(np.unique(means)) < 2:
        return None, None
    room = 3 * np.ptp(means)
    first = max(np.nanmin(values), means.min() - room)
    last = min(np.nanmax(values), means.max() + room)
    margin = 0.05 * (last - first)
    return first - margin, last + margin
