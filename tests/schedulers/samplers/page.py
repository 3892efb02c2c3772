"""The computed tables of docs/sde.md."""

import itertools
import re
from collections import defaultdict
from pathlib import Path

from examples.sampler_figures import REGIMES, regime_stds
from hyvideo.schedulers.noise_matching import matched_eta
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import SAMPLERS, schedule, shifted_levels
from tests.schedulers.samplers.marginals import marginals_table, markdown_table

PAGE = Path(__file__).parents[3] / "docs" / "sde.md"
TABLE = re.compile(r"^\|.*\n(?:\|.*\n)+", re.MULTILINE)
# the other tables are written by hand
STDS, REGIMES_TABLE, MARGINALS, UNUSUAL, MATCHES = 1, 3, 4, 5, 6
NUM_STEPS, SHIFT, ETA = 20, 5.0, 0.5
LEVELS = shifted_levels(NUM_STEPS, SHIFT)
SHOWN = (1, 2, 5, 10, 15, 19, 20)  # steps of the first table
ETAS = (0.1, 0.25, 0.5, 0.7, 0.9, 1.2)  # from well below to well above published recipes


def tables(num_steps: int, shift: float, eta: float) -> dict[str, str]:
    """Return a table by title: a row for each step, a column for each sampler; 0 at deterministic
    steps.
    """
    schedules = [
        Schedule.build(sde_type, num_steps=num_steps, shift=shift, eta=eta) for sde_type in SAMPLERS
    ]
    quantities = {
        "Standard deviation of each step": (
            [[step.std for step in made.transitions] for made in schedules],
            ".4f",
        ),
        "Gradient norm N_t of the log-probability": (
            [made.log_prob_grad_norms.tolist() for made in schedules],
            ".4g",
        ),
        "Equalizer factor S_t = median(N) / N_t": (
            [made.equalizer_weights.tolist() for made in schedules],
            ".4g",
        ),
    }
    found = {}
    for title, (columns, spec) in quantities.items():
        steps = enumerate(zip(schedules[0].sigmas, *columns), start=1)
        rows = [
            [str(number), f"{sigma:.4f}", *(f"{v:{spec}}" for v in values)]
            for number, (sigma, *values) in steps
        ]
        found[title] = markdown_table(["step", "sigma", *SAMPLERS], rows)
    return found


def fast_tables() -> dict[int, str]:
    """Return tables by their index on the page."""
    head, ruler, *rows = next(iter(tables(NUM_STEPS, SHIFT, ETA).values())).splitlines(
        keepends=True
    )
    stds = "".join([head, ruler, *(rows[step - 1] for step in SHOWN)])
    return {
        STDS: stds,
        REGIMES_TABLE: regimes_table(),
        UNUSUAL: unusual_table(),
        MATCHES: matches_table(),
    }


def regimes_table() -> str:
    columns = {"step": ["1"], "sigma": [f"{LEVELS[0]:.4f}"]}
    for regime, name in itertools.product(REGIMES, ("sage_grpo", "flow_grpo")):
        columns[f"{name} {regime}"] = [
            f"{std:.4f}" for std in regime_stds(name, LEVELS, ETA, regime)[:1]
        ]
    return markdown_table(list(columns), zip(*columns.values()))


def unusual_table() -> str:
    """Return the deterministic steps of each sampler, and the etas with a std above 1, by the
    number of steps.
    """
    rows = []
    for sde_type, sampler in SAMPLERS.items():
        deterministic, exploding = defaultdict(list), defaultdict(list)
        for num_steps, eta in itertools.product(range(4, 201), ETAS):
            if eta <= sampler.max_eta:
                stds = [
                    step.std
                    for step in schedule(
                        sde_type, shifted_levels(num_steps, SHIFT), eta, "stochastic"
                    )
                ]
                for place in (place for place, std in enumerate(stds, start=1) if std == 0):
                    deterministic["last" if place == num_steps else f"step {place}"].append(
                        num_steps
                    )
                if max(stds) > 1:
                    exploding[f"eta {eta:g}"].append(num_steps)
        cells = [
            [f"{place}: {min(n)}-{max(n)}" for place, n in found.items()]
            for found in (deterministic, exploding)
        ]
        rows.append([sde_type, *("; ".join(cell) or "none" for cell in cells)])
    return markdown_table(["SDE", "deterministic", "std > 1"], rows)


def matches_table() -> str:
    rows, target = [], f"sage_grpo:{ETA}"
    for name in SAMPLERS:
        variance = sum(step.std**2 for step in schedule(name, LEVELS, ETA, "stochastic"))
        eta = matched_eta(target, name, num_steps=NUM_STEPS, shift=SHIFT, last_step="stochastic")
        rows.append([name, f"{variance:.4f}", f"{eta:.4f}"])
    return markdown_table(
        ["SDE", f"variance at eta {ETA}", "eta for the variance of sage_grpo"], rows
    )


def slow_tables() -> dict[int, str]:
    """Return the table that takes several seconds, by its index on the page."""
    return {MARGINALS: marginals_table()}


def page_with(tables: dict[int, str]) -> str:
    """Return the page with the given tables, by index, in place of the current ones."""
    number = itertools.count()
    return TABLE.sub(
        lambda found: tables.get(next(number), found[0]), PAGE.read_text(encoding="utf-8")
    )
