"""A folder of scripts.compare_recipes: each row of seeds.csv, from the metrics of its run."""

from pathlib import Path

from scripts.audit.run import Run, read_csv
from scripts.audit.statements import Audit

TOPIC = "Recipes"
SEEDS = "seeds.csv"
METRICS = {
    "reward": "reward",
    "reward_seen_prompts": "seen/reward",
    "reward_unseen_prompts": "unseen/reward",
}


def audit_recipes(folder: Path, audit: Audit) -> list[Path]:
    """Record the statements about the table of seeds and return the folders of its runs."""
    found = []
    text = "rollouts, forward passes and rewards of each run at the budget"
    with audit.compare(TOPIC, text, f"{SEEDS}, cells/*/metrics.jsonl", 1e-5) as rows:
        for row in read_csv(folder / SEEDS):
            name = f"{row['recipe']}-seed{row['seed']}"
            run = Run(folder / "cells" / name)
            found.append(run.folder)
            rows.equal(f"seed of {name}", int(row["seed"]), run.get("seed", 42))
            points = points_of(run)
            amount = float(row["rollouts"])
            for column in ("forwards", *METRICS):
                if row.get(column):
                    value = at(points, amount, METRICS.get(column, column))
                    recorded = float(row[column])
                    scale = max(1.0, abs(recorded))
                    rows.number(f"{column} of {name}", value / scale, recorded / scale)
    return found


def points_of(run: Run) -> list[dict]:
    """Return costs and metrics at each validation of a run, from the base model on."""
    rollouts = forwards = 0.0
    points = []
    for line in run.metrics:
        if line["iteration"] > 0:
            rollouts += run.rollouts
            forwards += run.rollouts * line["cost/forwards"]
        if "validation/reward" in line:
            values = {name.removeprefix("validation/"): value for name, value in line.items()}
            points.append(values | {"rollouts": rollouts, "forwards": forwards})
    return points


def at(points: list[dict], rollouts: float, name: str) -> float:
    """Return a value after so many rollouts, between two validations in proportion."""
    before = [point for point in points if point["rollouts"] <= rollouts]
    after = [point for point in points if point["rollouts"] >= rollouts]
    low = before[-1] if before else after[0]
    high = after[0] if after else before[-1]
    width = high["rollouts"] - low["rollouts"]
    share = (rollouts - low["rollouts"]) / width if width else 0.0
    return low[name] + share * (high[name] - low[name])
