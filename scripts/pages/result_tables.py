"""Tables of pages with measured results, from the numbers of each seed in docs/data."""

from collections.abc import Iterable, Mapping, Sequence

from hyvideo.files.files import ROOT
from hyvideo.validation.intervals import Interval
from scripts.pages.markdown import markdown_table
from studies.tables.seed_table import Label, SeedTable, read_seed_table
from studies.tables.table import format_interval

HEADS = {  # by metric
    "reward": "reward",
    "true_reward": "true reward",
    "all_correct": "all correct",
    "frechet_distance": "Fréchet distance",
    "diversity": "diversity",
}
WITH_INTERVAL = ("reward", "true_reward")
SEEDLESS = ""  # seed of the base model, which is not trained


def read(name: str) -> SeedTable:
    return read_seed_table(ROOT / "docs/data" / name)


def means(
    name: str, heads: Sequence[str], rows: Mapping[Label, Sequence[str]], metrics: Iterable[str]
) -> str:
    """Return the means of some labels over their seeds; rewards have their interval.

    ``rows`` has the first cells of each label, under ``heads``.
    """
    table, metrics = read(name), list(metrics)
    lines = []
    for label, words in rows.items():
        found = table.intervals(label)
        cells = [_cell(metric, found[metric]) for metric in metrics]
        is_trained = SEEDLESS not in table.values[label][metrics[0]]
        seeds = str(table.num_seeds(label)) if is_trained else ""
        lines.append([*words, seeds, *cells])
    return markdown_table([*heads, "seeds", *(HEADS[metric] for metric in metrics)], lines)


def differences(
    name: str,
    head: str,
    pairs: Mapping[tuple[Label, Label], str],
    metrics: Iterable[str],
) -> str:
    """Return the differences of pairs of labels, paired by seed. Those whose interval excludes 0 are
    bold.
    """
    table, metrics = read(name), list(metrics)
    lines = []
    for (label, other), words in pairs.items():
        found = table.differences(label, other)
        lines.append([words, *(_difference(found[metric]) for metric in metrics)])
    return markdown_table([head, *(HEADS[metric] for metric in metrics)], lines)


def _cell(metric: str, interval: Interval) -> str:
    if metric in WITH_INTERVAL:
        return "".join(format_interval(interval))
    return _number(metric, interval.mean)


def _number(metric: str, value: float) -> str:
    if metric == "all_correct":
        return f"{value:.0%}".replace("%", " %")
    return f"{value:.3f}"


def _difference(interval: Interval) -> str:
    mean, brackets = format_interval(interval, sign="+")
    return f"**{mean}**{brackets}" if interval.excludes_zero else f"{mean}{brackets}"


ALL = ("reward", "true_reward", "all_correct", "frechet_distance", "diversity")
TRUE = ("true_reward", "all_correct", "frechet_distance", "diversity")


def gain() -> str:
    rows = {
        ("base model",): ["base model"],
        ("base model, guidance 3",): ["base model with guidance 3"],
        ("SAGE-GRPO",): ["SAGE-GRPO, `configs/miniature.yaml`"],
        ("control of SAGE-GRPO",): ["control of SAGE-GRPO"],
        ("DiffusionNFT",): ["DiffusionNFT, `configs/miniature_nft.yaml`"],
        ("control of DiffusionNFT",): ["control of DiffusionNFT"],
    }
    return means("gain.csv", ["policy"], rows, ALL)


def gain_over_control() -> str:
    pairs = {
        ((method,), (f"control of {method}",)): f"{method} minus its control"
        for method in ("SAGE-GRPO", "DiffusionNFT")
    }
    return differences("gain.csv", "difference", pairs, ("reward", "true_reward", "diversity"))


def what_training_buys() -> str:
    """Return the table of the README, of three files."""
    rows = (
        ("gain.csv", "base model", "base model", "8"),
        ("gain.csv", "base model, guidance 3", "base model with guidance 3", "16"),
        ("gain.csv", "SAGE-GRPO", "SAGE-GRPO, 30 iterations", "8"),
        ("gain.csv", "control of SAGE-GRPO", "control: the same, but rewards are ignored", "8"),
        ("improve.csv", "better half", "fine-tuned on its own best videos", "8"),
    )
    lines = []
    for file, label, words, passes in rows:
        found = read(file).intervals((label,))
        cells = [_number(metric, found[metric].mean) for metric in ("all_correct", "diversity")]
        lines.append([words, cells[0], f"{found['reward'].mean:.2f}", cells[1], passes])
    heads = ["miniature", "flawless", "reward", "diversity", "forward passes per video"]
    return markdown_table(heads, lines)


SAMPLERS = ("flow_grpo", "cps", "precise")


def samplers() -> str:
    rows = {(name, "30"): [f"`{name}`"] for name in ("sage_grpo", *SAMPLERS)}
    return means("samplers.csv", ["`--sde_type`"], rows, ALL)


def sampler_differences() -> str:
    pairs = {((name, "30"), ("sage_grpo", "30")): f"`{name}`" for name in SAMPLERS}
    metrics = ("reward", "true_reward", "frechet_distance", "diversity")
    return differences("samplers.csv", "`--sde_type`", pairs, metrics)


def fine_tuning() -> str:
    rows = {
        ("base model",): ["nothing, the base model"],
        ("better half",): ["guided videos, the better half"],
        ("all guided",): ["guided videos, all (control)"],
        ("all unguided",): ["unguided videos, all (control)"],
    }
    return means("improve.csv", ["trained on"], rows, TRUE)


def experts() -> str:
    rows = {label: list(label) for label in read("experts.csv").values}
    return means("experts.csv", ["trained"], rows, TRUE)
