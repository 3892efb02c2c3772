"""Table of examples/galaxies/README.md, from the validations in docs/data/galaxies.csv."""

from statistics import fmean

from scripts.pages.markdown import markdown_table
from scripts.pages.result_tables import read
from studies.tables.seed_table import Values

NUMBERS = ("0", "1", "2", "3", "4", "more")  # of images of the quasar
CROSS = "4"
NAMES = {
    "sage": "SAGE-GRPO",
    "nft": "DiffusionNFT",
    "lora": "SAGE-GRPO, LoRA",
    "control": "SAGE-GRPO without a reward",
    "improve": "fine-tuning on its own best",
    "dpo": "DPO",
}


def results() -> str:
    """Return a row for the base model and for the last validation of each run, with means over its
    seeds.
    """
    table = read("galaxies.csv").values
    last = {run: iteration for run, iteration in table}  # a run's rows are in their order
    first_run = next(iter(last))
    rows = [["base model", "", *shares(table[first_run, "0"]), *scores(table[first_run, "0"]), ""]]
    for run, name in NAMES.items():
        values = table[run, last[run]]
        each = ", ".join(f"{share:.0f}" for share in values[CROSS].values())
        warnings = list(values["hacking"].values())
        rows.append(
            [name, each, *shares(values), *scores(values)]
            + [f"{sum(warnings):.0f} of {len(warnings)}"]
        )
    heads = ["run", "4, each seed", *NUMBERS, "reward", "realism", "diversity", "warnings"]
    return markdown_table(heads, rows)


def shares(values: Values) -> list[str]:
    return [f"{mean(values[number]):.0f}" for number in NUMBERS]


def scores(values: Values) -> list[str]:
    return [
        f"{mean(values['reward']):.3f}",
        f"{mean(values['realism']):.3f}",
        f"{mean(values['diversity']):.4f}",
    ]


def mean(by_seed: dict[str, float]) -> float:
    return fmean(by_seed.values())
