"""Table of examples/galaxies/README.md, from the validations in docs/data/galaxies.csv."""

from statistics import fmean

from scripts.pages.markdown import markdown_table
from scripts.pages.result_tables import read

NUMBERS = ("0", "1", "2", "3", "4", "more")  # of images of the quasar
CROSS = "4"
NAMES = {
    "sage": "SAGE-GRPO",
    "nft": "DiffusionNFT",
    "lora": "SAGE-GRPO, LoRA",
    "control": "SAGE-GRPO without a reward",
}


def results() -> str:
    """Return a row for each run and iteration, with means over its seeds."""
    rows = {}
    for (run, iteration), values in read("galaxies.csv").values.items():
        # iteration 0 is the base model in all runs
        name = "base model" if iteration == "0" else NAMES[run]
        shares = [f"{mean(values[number]):.0f}" for number in NUMBERS]
        each = [f"{share:.0f}" for share in values[CROSS].values()]
        warnings = list(values["hacking"].values())  # none of the base model
        rows[name, iteration] = [
            *shares,
            ", ".join(each) if warnings else "",
            f"{mean(values['reward']):.3f}",
            f"{mean(values['realism']):.3f}",
            f"{mean(values['diversity']):.4f}",
            f"{sum(warnings):.0f} of {len(warnings)}" if warnings else "",
        ]
    heads = ["run", "iterations", *NUMBERS, "4, each seed", "reward", "realism", "diversity"]
    return markdown_table([*heads, "warnings"], ([*key, *cells] for key, cells in rows.items()))


def mean(by_seed: dict[str, float]) -> float:
    return fmean(by_seed.values())
