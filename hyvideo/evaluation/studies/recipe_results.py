"""Results of recipes at equal cost: curves over the cost, a Pareto plot, a table and verdicts.

Metrics come from the validations of the runs, in metrics.jsonl and, for the base model, in samples/000000. They are
interpolated linearly between validations. Seconds are those of iterations times the number of processes, without
startup, validations and checkpoints.
"""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.run_plan import make_plan
from hyvideo.data.outside import parse_json
from hyvideo.evaluation.policy_scores import Evaluator
from hyvideo.evaluation.scores_file import Evaluation, summarise
from hyvideo.evaluation.studies.columns import FRECHET, UNSEEN, Column, intervals
from hyvideo.evaluation.studies.comparisons import NO_CORRECTION, as_markdown, compare
from hyvideo.evaluation.studies.intervals import Interval
from hyvideo.evaluation.studies.recipes import AXES, Budget
from hyvideo.evaluation.studies.runs import Run, Study
from hyvideo.evaluation.studies.study_command import finished
from hyvideo.evaluation.studies.table import Row, make_table, write_table
from hyvideo.evaluation.studies.train_runs import planned
from hyvideo.models.reward_models.rewards import DIMENSIONS
from hyvideo.records.metrics_file import read_metrics
from hyvideo.records.run_files import or_none, write_text

Trace = dict[str, np.ndarray]  # cost and metrics of a run at each validation; (validations,)
Point = dict[str, Interval]  # cost and metrics of a recipe at one cost, over its seeds

REWARD, TRUE_REWARD = Column("Reward", of_set="reward"), Column("True reward", of_set="true/reward")
UNSEEN_REWARD = Column(f"Reward{UNSEEN}", of_set="unseen/reward")
DIVERSITY = Column("Diversity", of_set="held_out/diversity")
SEEN_REWARD = Column("Reward, seen prompts", of_set="seen/reward")
COMPARED = (REWARD, SEEN_REWARD, UNSEEN_REWARD, TRUE_REWARD, FRECHET, DIVERSITY)
COLORS = [*(f"C{number}" for number in range(10)), "black", "navy", "lime", "gold"]
HEADS = ["Recipe", "Rollouts", "Forwards", "Seconds", "Forwards a rollout", "Forwards a video"]


def read_trace(study: Study, run: Run) -> Trace:
    """Read the validations of a run; values that were not measured are NaN."""
    config, folder, spent, points = study.config(run), study.folder(run), np.zeros(len(AXES)), []
    rollouts, base = make_plan(config, study.world_size).rollouts, folder / "samples/000000/measures.json"
    if base.is_file():
        points.append(dict(zip(AXES, spent)) | parse_json(base.read_text(encoding="utf-8")))
    for line in read_metrics(folder / "metrics.jsonl"):
        spent = spent + [rollouts, rollouts * line["cost/forwards"], line["time/iteration"] * study.world_size]
        if "validation/reward" in line:
            points.append(dict(zip(AXES, spent)) | {k.removeprefix("validation/"): v for k, v in line.items()})
    points = [point | _true_reward(point, config.reward_weights) for point in points]
    names = dict.fromkeys([*AXES, *(column.of_set for column in COMPARED), *DIMENSIONS, *config.reward_weights])
    return {name: np.array([point.get(name) for point in points], dtype=float) for name in names}


def _true_reward(values: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    truths = [values.get(f"true/{name}") for name in weights]
    return {} if None in truths else {"true/reward": np.dot(truths, [*weights.values()])}


def guided_base(study: Study, run: Run, scale: float) -> dict[str, float]:
    """Return the metrics of the base model with guidance in the validation of a run; stored in scores/."""
    config = study.config(run).with_settings(validation_cfg_scale=scale)
    with closing(Evaluator(config)) as evaluator:
        (evaluation,) = evaluator.policies({f"base-guided-{scale:g}": None}, study.out / "scores").values()
    values = {name: value.mean for name, value in summarise(evaluation).items()}
    for kind, is_seen in (("seen", True), ("unseen", False)):
        rewards = [entry["reward"] for entry in evaluation.videos if entry.get("seen") is is_seen]
        rewards = [reward for reward in rewards if reward is not None]
        values |= {f"{kind}/reward": np.mean(rewards)} if rewards else {}
    return values | _true_reward(values, config.reward_weights)


def forwards_per_video(run: PlannedRun) -> float:
    """Return the forward passes to sample a validation video."""
    return run.validation.plan.sampled_branches * run.validation.settings.grpo_sampling_steps


def columns_of(trace: Trace) -> list[Column]:
    titled = {column.of_set: column for column in COMPARED}
    return [titled.get(name, Column(name, of_set=name)) for name in trace]


def at_cost(trace: Trace, axis: str, amount: float) -> Evaluation:
    """Return the metrics of a run at the given cost, or at its end if it cost less."""
    found = {name: np.interp(amount, trace[axis], values) for name, values in trace.items()}
    return Evaluation([], {name: or_none(float(value)) for name, value in found.items()})


def curve(traces: list[Trace], axis: str, end: float = np.inf) -> list[Point]:
    """Return means and intervals over seeds at the validations of the first seed up to ``end``, and at ``end``."""
    amounts = traces[0][axis]
    amounts = [*amounts[amounts < end], end] if end < amounts[-1] else amounts
    return [intervals([at_cost(trace, axis, amount) for trace in traces], columns_of(traces[0])) for amount in amounts]


def write_results(study: Study, runs: list[Run], budget: Budget, guidance: float | None = None) -> None:
    """Write the results of the finished runs: recipes.md, .csv, .tex, verdicts.md, curves_<axis>.png and pareto.png.

    With ``guidance``, the table also has the base model with this guidance scale.
    """
    by_recipe: dict[str, dict[int, Trace]] = {}
    trained = finished(study, runs)
    for run in trained:
        by_recipe.setdefault(run.recipe.name, {})[run.seed] = read_trace(study, run)
    if not trained:
        raise ValueError(f"{study.out} contains no finished run yet")
    whole = planned(study, trained[0], trains=False)
    for axis in AXES:
        end = budget.amount if axis == budget.axis else np.inf
        curves = {name: curve([*traces.values()], axis, end) for name, traces in by_recipe.items()}
        draw(curves, [(axis, column.name) for column in COMPARED], study.out / f"curves_{axis}.png")
        if axis == budget.axis:
            reward = TRUE_REWARD if all(TRUE_REWARD.name in points[0] for points in curves.values()) else REWARD
            panels = [(column.name, reward.name) for column in (FRECHET, DIVERSITY)]
            draw(curves, panels, study.out / "pareto.png", compares_ends=True)
            rows = [
                _row(name, points[-1], forwards_per_video(whole), len(by_recipe[name]))
                for name, points in curves.items()
            ]
    (against, firsts), *others = by_recipe.items()
    base = curve([*firsts.values()][:1], budget.axis)[0]
    bases = [] if base["rollouts"].mean else [_row("Base model", base, forwards_per_video(whole), 0)]
    if guidance:
        values = dict.fromkeys(AXES, 0.0) | guided_base(study, trained[0], guidance)
        found = intervals([Evaluation([], values)], columns_of(firsts[min(firsts)]))
        of_video = forwards_per_video(whole.with_settings(validation_cfg_scale=guidance))
        bases.append(_row(f"Base model, guidance {guidance:g}", found, of_video, 0))
    rows = bases + rows
    notes = [
        f"At {budget.amount:,} {budget.axis} per run, or at its end if earlier; from the validations of the runs, with "
        "the same prompts and noise. 95 % intervals (Student's t) over training seeds, none for one seed.",
    ]
    if missing := [run.name for run in runs if run not in trained]:
        notes.append(f"Unfinished runs, not included: {', '.join(missing)}.")
    columns = columns_of(firsts[min(firsts)])[len(AXES) :]
    write_table(make_table(HEADS, {"": ""}, columns, rows, notes), study.out / "recipes")
    ends = {n: {s: at_cost(t, *budget) for s, t in traces.items()} for n, traces in by_recipe.items()}
    controls = {run.recipe.control_of: run.recipe.name for run in trained if run.recipe.control_of}
    pairs = [(name, against) for name, _ in others if name not in controls.values()]
    pairs += [pair for pair in controls.items() if pair[0] in ends]
    verdicts = [compare(f"{name} against {other}", ends[name], ends[other], COMPARED) for name, other in pairs]
    note = "Differences are paired by training seed, with 95 % intervals (Student's t) over seeds. " + NO_CORRECTION
    write_text(study.out / "verdicts.md", as_markdown(verdicts, COMPARED, [note]))


def _row(name: str, end: Point, of_video: float, num_seeds: int) -> Row:
    rollouts, forwards, seconds = (end[axis].mean for axis in AXES)
    spent = [f"{amount:.0f}" for amount in (rollouts, forwards, seconds)]
    each = f"{forwards / rollouts:.4g}" if rollouts else ""
    values = {("", column): value for column, value in end.items()}
    return Row([name, *spent, each, f"{of_video:g}"], values, {"": num_seeds} if num_seeds else {})


def draw(curves: dict[str, list[Point]], panels: list[tuple[str, str]], path: Path, *, compares_ends: bool = False):
    """Draw a panel for each pair of columns that all curves have: the second over the first, as bands or end points."""
    panels = [pair for pair in panels if all(point.keys() >= {*pair} for points in curves.values() for point in points)]
    if not panels:
        return
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(4.8 * len(panels) + 1.6, 4.4), squeeze=False, layout="constrained"
    )
    for axes, pair in zip(all_axes[0], panels):
        axes.set(xlabel=pair[0], ylabel=pair[1])
        axes.grid(alpha=0.3)
        (_draw_ends if compares_ends else _draw_bands)(axes, pair, curves)
    if not compares_ends:
        figure.legend(*all_axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_bands(axes: Axes, pair: tuple[str, str], curves: dict[str, list[Point]]) -> None:
    for number, (recipe, points) in enumerate(curves.items()):
        x = [point[pair[0]].mean for point in points]
        y = np.array([(point[pair[1]].mean, point[pair[1]].low, point[pair[1]].high) for point in points]).T
        color = COLORS[number % len(COLORS)]
        axes.plot(x, y[0], ("-", "--", ":")[number % 3], marker=".", color=color, label=recipe)
        axes.fill_between(x, y[1], y[2], color=color, alpha=0.12, linewidth=0)


def _draw_ends(axes: Axes, pair: tuple[str, str], curves: dict[str, list[Point]]) -> None:
    """Draw end points with their intervals, and names beside the panel, connected by lines."""
    better = [1 if column.higher_is_better else -1 for name in pair for column in COMPARED if column.name == name]
    axes.set_xlabel(pair[0] + ("" if better[0] > 0 else ", lower is better"))
    ends = {recipe: [points[-1][name] for name in pair] for recipe, points in curves.items()}
    places = {recipe: np.array([value.mean for value in end]) for recipe, end in ends.items()}
    colors = {recipe: COLORS[number % len(COLORS)] for number, recipe in enumerate(ends)}
    for number, (recipe, end) in enumerate(ends.items()):
        dominated = any((better * (place - places[recipe]) > 0).all() for place in places.values())
        errors = [[[value.mean - value.low], [value.high - value.mean]] for value in end]
        style = {"fmt": "os^Dv"[number % 5], "color": colors[recipe], "markerfacecolor": "white" if dominated else None}
        axes.errorbar(*places[recipe], *errors[::-1], **style, elinewidth=0.8, capsize=2)
    base = next(iter(curves.values()))[0]
    axes.plot(base[pair[0]].mean, base[pair[1]].mean, "k*", markersize=9)
    axes.set_title("filled: Pareto-optimal; star: first validation", fontsize="small", loc="left")
    in_order, (low, high) = sorted(places, key=lambda recipe: places[recipe][1]), axes.get_ylim()
    apart = min(0.065, 1 / len(in_order)) * np.arange(len(in_order))  # minimum, as a fraction of the panel's height
    heights = np.array([(places[recipe][1] - low) / (high - low) for recipe in in_order])
    above, below = np.maximum.accumulate(heights - apart), np.minimum.accumulate((heights - apart)[::-1])[::-1]
    heights = np.clip((above + below) / 2, 0, 1 - apart[-1]) + apart
    for recipe, height in zip(in_order, heights):
        line = {"arrowstyle": "-", "color": colors[recipe], "linewidth": 0.7, "linestyle": ":", "relpos": (0, 0.5)}
        text = {"xytext": (1.04, height), "textcoords": "axes fraction", "color": colors[recipe], "fontsize": "small"}
        axes.annotate(recipe, places[recipe], **text, va="center", arrowprops=line)
