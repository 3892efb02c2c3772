"""The metrics that a run writes to metrics.jsonl: meaning, unit, and where people see them.

The console, the report and the tables of docs/monitoring.md come from this file. A new metric is its
measurement and a row here; ``python -m scripts.pages`` then writes the page. The report also shows a
metric without a row, such as one of a custom objective, as one of the other metrics.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple


class Metric(NamedTuple):
    """A metric, or all metrics of one form: ``<stage>`` stands for a text without ``/``."""

    name: str
    meaning: str
    healthy: str = ""  # values of good runs, for docs/monitoring.md
    unit: str = ""
    # Title of the plot of `PLOTS` in the report that has it. "": a plot of its own among the other
    # metrics. None: none, or one that hyvideo/report/curves.js draws.
    plot: str | None = ""
    label: str = ""  # of its line in the plot; "": what a form stands for, or the name
    is_peak: bool = False  # whether a point for several iterations is their maximum, not their mean
    console: str = ""  # format of the value in the progress bar


class Plot(NamedTuple):
    """A plot of the report, of the metrics with its title."""

    title: str
    section: str  # id of the section of the page
    note: str = ""  # after the title
    from_zero: bool = False
    is_log: bool = False
    only_positive: bool = False  # not shown for a run in which all values are 0
    only_one_run: bool = False  # not shown in a comparison
    # "lines", "bars" above one another, or "map": a list per iteration, with one value per step
    kind: str = "lines"
    center: float | None = None  # of the colors of a map


MISSING_PLOT = "Failed rewards"
LOSS_NOTE = "of GRPO no measure of progress: around 0 with one update per iteration"
PLOTS = (
    Plot("Agreement with the answers", "rewards", note="0.5 is the base model's"),
    Plot("KL", "trust", note="to the anchor, it falls to 0 when the anchor moves", is_log=True),
    Plot("KL coefficient", "trust"),
    Plot("Clip fraction", "trust", from_zero=True),
    Plot("Gradient norm", "trust", from_zero=True),
    Plot("Largest deviation of a ratio from 1", "trust"),
    Plot("Loss", "trust", note=LOSS_NOTE),
    Plot("Mean ratio by step", "steps", kind="map", center=1.0),
    Plot("Largest deviation of a ratio from 1 by step", "steps", kind="map"),
    Plot("KL by step", "steps", kind="map"),
    Plot("Zero groups", "health", from_zero=True),
    Plot(MISSING_PLOT, "health", from_zero=True, only_positive=True),
    Plot("Skipped updates", "health", from_zero=True, only_positive=True),
    Plot("Peak memory", "cost", from_zero=True),
    Plot("Forward passes per video", "cost", from_zero=True),
    Plot("Time per iteration", "cost", from_zero=True),
    Plot("Time by stage", "cost", only_one_run=True, kind="bars"),
    Plot(
        "Speed of a rank", "cost", note="without recomputation", from_zero=True, only_one_run=True
    ),
    Plot("MFU: share of the GPU's peak", "cost", from_zero=True, only_one_run=True),
)

REWARD = (
    Metric(
        "reward/mean",
        "weighted sum of the *dimensions* (the scores of a video), mean over scored rollouts",
        "rises over tens of iterations",
        plot=None,
        console="reward {:.4f}",
    ),
    Metric(
        "reward/std",
        "standard deviation within a group, mean over groups",
        "above the rounding error",
        plot=None,
    ),
    Metric(
        "reward/<dimension>",
        "mean of one dimension, such as `reward/VQ`, without its weight",
        "does not fall for long",
        plot=None,
    ),
    Metric(
        "reward/Overall",
        "VQ + MQ + TA, if all three are scored",
        "rises with `reward/mean`",
        plot=None,
    ),
    Metric(
        "reward/missing",
        "rollouts whose reward failed",
        "0",
        unit="rollouts",
        plot=MISSING_PLOT,
        is_peak=True,
    ),
    Metric(
        "advantage/zero_groups",
        "groups with equal rewards, which give no gradient",
        "0 or few",
        unit="groups",
        plot="Zero groups",
        is_peak=True,
    ),
    Metric("quantiles/reward", "list: 21 quantiles over the rollouts", plot=None),
    Metric("quantiles/advantage", "list: 21 quantiles over the rollouts", plot=None),
)

POLICY = (
    Metric("loss/policy", "loss without the KL term", "see below", plot="Loss", label="policy"),
    Metric(
        "loss/total",
        "`loss/policy` plus the KL term",
        "close to `loss/policy`",
        plot="Loss",
        label="total",
    ),
    Metric("policy/ratio_mean", "mean likelihood ratio of the sampled steps", "1"),
    Metric(
        "policy/ratio_max_deviation",
        "largest distance of a ratio from 1 in the iteration",
        "0, or rounding in bf16; two updates: near `clip_range`",
        plot="Largest deviation of a ratio from 1",
        label="all updates",
        is_peak=True,
        console="max |ratio - 1| {:.1e}",
    ),
    Metric(
        "policy/ratio_first_deviation",
        "largest distance of a ratio from 1 in the first update",
        "at most 1e-6",
        plot="Largest deviation of a ratio from 1",
        label="first update",
        is_peak=True,
    ),
    Metric(
        "policy/clip_fraction",
        "share of terms with a ratio outside the clip range",
        "0; two updates: below about 0.3",
        unit="fraction",
        plot="Clip fraction",
        label="clipped",
    ),
    Metric(
        "policy/log_prob",
        "log-probability per element of the sampled steps",
        "nearly constant",
        unit="per element",
    ),
    Metric(
        "by_step/ratio_mean",
        "list: mean ratio of each denoising step",
        "similar for all steps",
        plot="Mean ratio by step",
    ),
    Metric(
        "by_step/ratio_max_deviation",
        "list: largest distance of a ratio from 1 of each denoising step",
        "similar for all steps",
        plot="Largest deviation of a ratio from 1 by step",
    ),
    Metric(
        "by_step/kl",
        "list: weighted KL of each denoising step",
        "similar for all steps",
        plot="KL by step",
    ),
    Metric(
        "policy/max_deviation",
        "custom objective: largest distance to the rollout policy in the iteration",
        "depends on the objective",
        is_peak=True,
    ),
    Metric(
        "policy/first_deviation",
        "custom objective: largest distance in the first update",
        "0",
        is_peak=True,
    ),
    Metric(
        "policy/velocity_norm",
        "norm of the policy's velocity, divided by the norm of the anchor's velocity",
        "near 1",
        is_peak=True,
    ),
    Metric(
        "reward_gradient/reward",
        "reward of the videos with gradient",
        "rises with `reward/mean`",
    ),
    Metric(
        "reward_gradient/norm",
        "norm of the gradient of the weighted reward with respect to the predicted latents",
        "steady",
        is_peak=True,
    ),
    Metric(
        "reward_gradient/missing",
        "share of rollouts left out, because reward or gradient is not finite",
        "0",
        unit="fraction",
        is_peak=True,
    ),
    Metric(
        "nft/error",
        "mean squared velocity error on re-noised rollouts",
        "falls a little",
        unit="per element",
    ),
    Metric(
        "nft/distance",
        "velocity difference of policy and rollout policy, divided by the velocity error of the "
        "rollout policy",
        "above 0, because the recipes make two updates",
    ),
    Metric(
        "nft/distance_max",
        "largest `nft/distance` of a term in the iteration",
        "above 0, for the same reason",
        is_peak=True,
        console="max distance {:.1e}",
    ),
    Metric(
        "nft/distance_first",
        "largest `nft/distance` of a term in the first update",
        "0",
        is_peak=True,
    ),
    Metric(
        "nft/contrast",
        "share of the gradient from the contrast with the rollout policy; the rest is "
        "advantage-weighted regression",
        "above 0, for the same reason",
    ),
    Metric(
        "nft/advantage_clipped",
        "share of advantages clipped at `advantage_clip`",
        "near 0",
        unit="fraction",
    ),
    Metric(
        "distill/error",
        "velocity difference of student and teacher, relative to the teacher's velocity",
        "falls",
    ),
    Metric(
        "distill/deviation_max",
        "largest distance between a step in the rollout and the same step in the update, divided "
        "by the length of the step",
        "0, or rounding in bf16",
        is_peak=True,
    ),
    Metric(
        "distill/deviation_first",
        "the same distance, largest in the first update",
        "0, or rounding in bf16",
        is_peak=True,
    ),
    Metric(
        "dpo/accuracy",
        "share of pairs in which the policy favors the winner more than the base model does",
        "0.5, then rises",
        unit="fraction",
        plot="Agreement with the answers",
        label="training pairs",
        console="accuracy {:.2f}",
    ),
    Metric(
        "dpo/margin",
        "mean log odds for the winner, compared with the base model",
        "0, then rises",
    ),
    Metric(
        "dpo/contrast",
        "difference of both videos of a pair in how the velocity error has changed, divided by "
        "their errors under the base model",
        "0 at first, then rises",
    ),
    Metric(
        "dpo/displacement",
        "velocity error on the winners, policy minus base model",
        "around 0",
        unit="per element",
        console="displacement {:+.1e}",
    ),
    Metric(
        "dpo/deviation_max",
        "largest difference of the velocity errors of policy and base model, divided by the error "
        "of the base model",
        "0 at first",
        is_peak=True,
    ),
    Metric(
        "dpo/deviation_first",
        "the same difference, largest in the first update",
        "0 at first",
        is_peak=True,
    ),
    Metric(
        "dpo/held_out_accuracy",
        "`dpo/accuracy` on pairs of held-out prompts, at validations",
        "above 0.5",
        unit="fraction",
        plot="Agreement with the answers",
        label="held-out pairs",
    ),
    Metric("dpo/held_out_margin", "`dpo/margin` on the same pairs", "rises"),
)

TRUST_REGION = (
    Metric(
        "kl/position",
        "KL to the anchor",
        "0 after a refresh of the anchor, then rises",
        unit="per element",
        plot="KL",
        label="to the anchor",
        console="KL {:.1e}",
    ),
    Metric(
        "kl/velocity",
        "KL to the rollout policy",
        "0; two updates: small",
        unit="per element",
        plot="KL",
        label="to the rollout policy",
    ),
    Metric(
        "kl/coef",
        "coefficient of the KL term",
        "rises to `kl_weight` in the warm-up",
        plot="KL coefficient",
        label="coefficient",
    ),
    Metric(
        "anchor/age",
        "updates since the anchor equaled the policy",
        "moving anchor: below `update_ref_model_step`",
        unit="updates",
    ),
    Metric(
        "grad/norm",
        "global norm of the gradient before clipping",
        "steady",
        plot="Gradient norm",
        label="norm before clipping",
        is_peak=True,
    ),
    Metric(
        "grad/spike",
        "`grad/norm` divided by the median of the last 50 updates; 1 in the first five",
        "0.5 to 2",
        is_peak=True,
    ),
    Metric("lr", "learning rate", "the set value, after `warmup_steps`"),
    Metric(
        "update",
        "optimizer updates since the run began",
        "`iteration` x `num_updates_per_rollout`, minus skipped updates",
        unit="updates",
        plot=None,
    ),
    Metric(
        "update/skipped",
        "updates skipped because of NaN or inf; `max_bad_updates` in a row stop the run",
        "0",
        unit="updates",
        plot="Skipped updates",
        label="not finite",
        is_peak=True,
    ),
    Metric(
        "update/without_signal",
        "updates skipped because no term has a gradient",
        "0",
        unit="updates",
        plot="Skipped updates",
        label="without a gradient",
        is_peak=True,
    ),
    Metric("iteration", "iterations since the run began", unit="iterations", plot=None),
)

COST = (
    Metric(
        "time/iteration",
        "the iteration without validation and checkpoint",
        "steady",
        unit="s",
        plot="Time per iteration",
    ),
    Metric(
        "time/conditions",
        "encoding the prompts",
        "near 0 after one epoch; if not, set `precompute_conditions`",
        unit="s",
        plot="Time by stage",
        label="conditions",
    ),
    Metric(
        "time/videos",
        "dpo and sft: reading latents",
        "near 0",
        unit="s",
        plot="Time by stage",
        label="videos",
    ),
    Metric(
        "time/rollout",
        "sampling",
        "largest, with `time/update`",
        unit="s",
        plot="Time by stage",
        label="rollout",
    ),
    Metric(
        "time/anchor",
        "forward passes of the anchor",
        "0 after a refresh",
        unit="s",
        plot="Time by stage",
        label="anchor",
    ),
    Metric("time/decode", "decoding videos", unit="s", plot="Time by stage", label="decode"),
    Metric(
        "time/reward",
        "waiting for scores",
        "near 0",
        unit="s",
        plot="Time by stage",
        label="reward",
    ),
    Metric(
        "time/record",
        "writing videos and scores",
        unit="s",
        plot="Time by stage",
        label="record",
    ),
    Metric(
        "time/update",
        "forward and backward passes, optimizer",
        "largest, with `time/rollout`",
        unit="s",
        plot="Time by stage",
        label="update",
    ),
    Metric(
        "time/scoring",
        "scoring, in the background",
        "short enough that `time/reward` is near 0",
        unit="s",
        plot=None,
    ),
    Metric(
        "time/cpu",
        "CPU time of the iteration in this process, decoding and scoring included",
        "steady",
        unit="s",
        plot=None,
    ),
    Metric("time/since_start", "time since this process began to train", unit="s", plot=None),
    Metric(
        "perf/tflops/<stage>",
        "speed of the main rank by stage",
        "steady",
        unit="TFLOP/s",
        plot="Speed of a rank",
    ),
    Metric(
        "perf/mfu/<stage>",
        "share of the bf16 peak of the GPU that `perf/tflops/<stage>` reaches",
        "steady",
        plot="MFU: share of the GPU's peak",
    ),
    Metric(
        "cost/forwards",
        "forward passes of the transformer per video",
        "constant, less after a refresh",
        plot="Forward passes per video",
        label="forward passes",
    ),
    Metric(
        "memory/peak_gib",
        "peak memory of tensors in the iteration, on the main rank",
        "constant after iteration 2",
        unit="GiB",
        plot="Peak memory",
        label="tensors",
        is_peak=True,
    ),
    Metric(
        "memory/peak_reserved_gib",
        "peak memory of the allocator in the iteration, on the main rank",
        "constant after iteration 2",
        unit="GiB",
        plot="Peak memory",
        label="allocator",
        is_peak=True,
    ),
    Metric(
        "memory/<stage>_gib",
        "peak memory of tensors in a stage, on a GPU",
        "constant after iteration 2",
        unit="GiB",
        is_peak=True,
    ),
)

# The report draws those of validation/ from the files of the validations.
VALIDATION = (
    Metric(
        "validation/reward",
        "mean reward, the metric to judge a run by",
        "[rises](judge_a_run.md#expected-curves)",
    ),
    Metric("validation/seen/reward", "mean reward of prompts that are also trained on", "rises"),
    Metric(
        "validation/unseen/reward",
        "mean reward of all other prompts",
        "rises with `validation/seen/reward`",
    ),
    Metric("validation/reward_std", "standard deviation over the videos", "falls"),
    Metric(
        "validation/<dimension>",
        "one dimension, or a metric of a custom scorer",
        "rises or stays constant",
    ),
    Metric("validation/Overall", "VQ + MQ + TA", "rises with `validation/reward`"),
    Metric("validation/missing", "videos whose reward failed", "0", unit="videos"),
    Metric(
        "validation/hacking",
        "1 if the [reward hacking rule](judge_a_run.md#reward-hacking) fires, else 0",
        "0",
    ),
    Metric(
        "hacking/transfer",
        "share of the gain that [is real](judge_a_run.md#how-much-of-the-gain-is-real)",
        "near 1",
    ),
    Metric("validation/held_out/exposure", "mean brightness (luma), 0 to 1", "near base"),
    Metric(
        "validation/held_out/saturation",
        "mean strength of the colors (chroma), 0 to 1",
        "near base",
    ),
    Metric(
        "validation/held_out/clipped", "share of pixels with a channel at 0 or 255", "does not rise"
    ),
    Metric("validation/held_out/motion", "change of luma between frames, 0 to 1", "near base"),
    Metric(
        "validation/held_out/frozen",
        "share of frames that nearly equal the previous frame",
        "does not rise",
    ),
    Metric(
        "validation/held_out/sharpness",
        "variance of the Laplacian divided by the variance of luma; 1 for white noise",
        "near base",
    ),
    Metric(
        "validation/held_out/<scorer>/<dimension>",
        "a score of `--held_out_reward_model`",
        "does not fall",
    ),
    Metric(
        "validation/held_out/diversity",
        "distance among videos of a prompt, 0 (all equal) to 1",
        "falls slowly",
    ),
    Metric("validation/frechet_distance", "miniature: distance to real videos", "does not rise"),
    Metric(
        "validation/true/<dimension>",
        "miniature: the dimension measured from the pixels, 0 to 1",
        "rises",
    ),
    Metric(
        "validation/color_correct",
        "miniature: share of videos with the color of the prompt",
        "rises",
    ),
    Metric(
        "validation/shape_correct",
        "miniature: share of videos with the shape of the prompt",
        "rises",
    ),
    Metric(
        "validation/direction_correct",
        "miniature: share of videos with the direction of the prompt",
        "rises",
    ),
    Metric(
        "validation/all_correct",
        "miniature: share of videos with correct color, shape and direction",
        "[rises](judge_a_run.md#expected-curves)",
    ),
)

# by name of the table in docs/monitoring.md
GROUPS = {
    "reward": REWARD,
    "policy": POLICY,
    "trust region": TRUST_REGION,
    "cost": COST,
    "validation": VALIDATION,
}
METRICS = tuple(metric for group in GROUPS.values() for metric in group)
_FORMS = [
    (re.compile(re.sub(r"<\w+>", "([^/]+)", metric.name)), metric)
    for metric in METRICS
    if "<" in metric.name
]


class Found(NamedTuple):
    """A metric of a run with its row."""

    name: str
    metric: Metric
    label: str  # of its line in a plot


@cache
def find(name: str) -> Found | None:
    """Return the row of a metric, its own before that of a form; None for an unknown metric."""
    for metric in METRICS:
        if metric.name == name:
            return Found(name, metric, metric.label or name)
    for form, metric in _FORMS:
        match = form.fullmatch(name)
        if match:
            return Found(name, metric, metric.label or " ".join(match.groups()))
    return None


def is_peak(name: str) -> bool:
    """Return whether a metric is watched for outliers, an unknown one by its name."""
    found = find(name)
    return found.metric.is_peak if found else "max" in name


def console_texts() -> dict[str, str]:
    """Return the formats of the metrics in the progress bar, by name."""
    return {metric.name: metric.console for metric in METRICS if metric.console}


def table_of(metrics: Iterable[Metric]) -> str:
    """Return the rows of metrics as a table in Markdown."""
    rows = ["| name | meaning | unit | healthy |", "|---|---|---|---|"]
    for metric in metrics:
        cells = (f"`{metric.name}`", metric.meaning, metric.unit, metric.healthy)
        rows.append(" ".join(f"| {cell}" if cell else "|" for cell in cells) + " |")
    return "\n".join(rows) + "\n"
