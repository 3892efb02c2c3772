"""Checkpoints: their counters, the EMA, the anchor, and the steps of AdamW between two of them."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.audit.run import Run
from scripts.audit.statements import Audit, CannotCheck
from scripts.audit.updates import applied, strategy

TOPIC = "Checkpoints"
MOST = 40  # parameters that are read, of a large model
ROUNDING = 2e-5  # of float32, relative to the largest element of a tensor


def audit_checkpoints(run: Run, audit: Audit) -> None:
    text = "a checkpoint has the counters and the metrics of its iteration"
    with audit.compare(TOPIC, text, "checkpoints/, state.json, metrics.jsonl") as rows:
        for iteration, folder in run.checkpoints.items():
            state = json.loads((folder / "state.json").read_text())
            found = run.by_iteration[iteration]
            where = f"checkpoint {iteration}"
            rows.equal(f"iteration of {where}", iteration, state["iteration"])
            rows.equal(f"updates of {where}", found["update"], state["update"])
            rows.equal(f"age of the anchor of {where}", found["anchor/age"], state["anchor_age"])
            for name, value in state["metrics"].items():
                if isinstance(value, int | float) and math.isfinite(value) and name in found:
                    if not name.startswith(("time/", "memory/")):
                        rows.number(f"{name} of {where}", value, found[name])
    _audit_average(run, audit)
    _audit_anchor(run, audit)
    _audit_adam(run, audit)


def _audit_average(run: Run, audit: Audit) -> None:
    text = "the EMA moves towards the policy by 1 - ema_decay in each update"
    with audit.compare(TOPIC, text, "checkpoints/", ROUNDING) as rows:
        decay = run.get("ema_decay", 0.0)
        if not decay:
            raise CannotCheck("the run has no EMA")
        for before, after in one_update_apart(run):
            for name in chosen(after, "average."):
                policy = f"policy.{name}"
                old = read(before, [f"average.{name}"])
                new = read(after, [f"average.{name}", policy])
                average, weights = new[f"average.{name}"], new[policy]
                expected = decay * old[f"average.{name}"] + (1 - decay) * weights
                rows.number(f"{name}, {after.name}", 0.0, _distance(expected, average))


def _audit_anchor(run: Run, audit: Audit) -> None:
    text = "the anchor has the weights of the policy at its last refresh"
    with audit.compare(TOPIC, text, "checkpoints/, metrics.jsonl", ROUNDING) as rows:
        if not strategy(run).endswith("moving"):
            raise CannotCheck("the run has no moving anchor")
        for iteration, folder in run.checkpoints.items():
            refreshed = max(
                (
                    i
                    for i, line in run.by_iteration.items()
                    if i <= iteration and line.get("anchor/age") == 0
                ),
                default=0,
            )
            if refreshed == iteration or refreshed not in run.checkpoints:
                continue  # not stored, or nothing to compare with
            for name in chosen(folder, "anchor."):
                anchor = read(folder, [f"anchor.{name}"])[f"anchor.{name}"]
                policy = read(run.checkpoints[refreshed], [f"policy.{name}"])[f"policy.{name}"]
                rows.number(f"{name}, checkpoint {iteration}", 0.0, _distance(policy, anchor))


def _audit_adam(run: Run, audit: Audit) -> None:
    """The gradient of an update follows from AdamW's first moments before and after it."""
    text = "weights and moments follow from AdamW's equations, with the recorded learning rate"
    rates = {}
    for line in run.all_lines:
        for update in applied(line):
            rates[update["update"]] = update
    with audit.compare(TOPIC, text, "checkpoints/, audit.jsonl", 1e-4) as rows:
        first, second = betas(run)
        decay = run.get("weight_decay", 0.01)
        epsilon = run.get("adam_epsilon", 1e-8)
        norms: dict[int, float] = {}
        complete = True
        for before, after in one_update_apart(run):
            number = json.loads((after / "state.json").read_text())["update"]
            if number not in rates:
                raise CannotCheck("audit.jsonl has no line of this update")
            lr = rates[number]["lr"]
            names = chosen(after, "optimizer.", ".exp_avg")
            complete = len(names) == len(all_names(after, "optimizer.", ".exp_avg"))
            for name in names:
                keys = [f"policy.{name}"]
                keys += [f"optimizer.{name}.{key}" for key in ("exp_avg", "exp_avg_sq", "step")]
                old, new = read(before, keys), read(after, keys)
                p, m, v, _ = (old[key].double() for key in keys)
                p_new, m_new, v_new, step = (new[key].double() for key in keys)
                gradient = (m_new - first * m) / (1 - first)
                norms[number] = norms.get(number, 0.0) + float((gradient**2).sum())
                where = f"{name}, update {number}"
                expected = second * v + (1 - second) * gradient**2
                rows.number(f"second moment of {where}", 0.0, _distance(expected, v_new))
                count = float(step)
                change = m_new / (1 - first**count)
                change /= (v_new / (1 - second**count)).sqrt() + epsilon
                moved = p * (1 - lr * decay) - lr * change
                # relative to the change, of which rounding of the weights is a part
                rows.number(f"weights of {where}", 0.0, _moved(moved, p_new, p))
        if complete:
            limit = run.get("max_grad_norm", 1.0)
            for number, square in norms.items():
                expected = min(limit, rates[number]["grad_norm"])
                found = math.sqrt(square)
                rows.number(f"norm of the gradient of update {number}", 1.0, found / expected)


def betas(run: Run) -> tuple[float, float]:
    """Return the decays of AdamW's moments."""
    both = run.get("betas")
    if both:
        return tuple(both)
    return run.get("adam_beta1", 0.9), run.get("adam_beta2", 0.999)


def _distance(expected, found) -> float:
    """Return the largest difference relative to the largest element."""
    largest = float(expected.abs().max())
    return float((expected - found).abs().max()) / max(largest, 1e-20)


def _moved(expected, found, before) -> float:
    """Return the largest difference of two updates, relative to the largest change and beyond the
    rounding of the weights.
    """
    change = float((expected - before).abs().max())
    rounding = 1.2e-7 * float(before.abs().max())
    difference = float((expected - found).abs().max())
    return max(0.0, difference - rounding) / max(change, 1e-20)


# --- reading --------------------------------------------------------------------------------------


def one_update_apart(run: Run) -> Iterator[tuple[Path, Path]]:
    """Yield pairs of checkpoints with one update between them. Raises CannotCheck if there are
    none.
    """
    folders = list(run.checkpoints.values())
    updates = [json.loads((folder / "state.json").read_text())["update"] for folder in folders]
    pairs = [
        (folders[i], folders[i + 1])
        for i in range(len(folders) - 1)
        if updates[i + 1] == updates[i] + 1
    ]
    if not pairs:
        raise CannotCheck(
            "no two checkpoints are one update apart; a short run with --save_interval 1 and "
            "--save_total_limit 0 has them"
        )
    yield from pairs


def all_names(folder: Path, prefix: str, suffix: str = "") -> list[str]:
    """Return the parameters of which a checkpoint has a tensor of this kind."""
    from torch.distributed.checkpoint import FileSystemReader

    keys = FileSystemReader(folder / "tensors").read_metadata().state_dict_metadata
    return [
        key.removeprefix(prefix).removesuffix(suffix)
        for key in keys
        if key.startswith(prefix) and key.endswith(suffix)
    ]


def chosen(folder: Path, prefix: str, suffix: str = "") -> list[str]:
    """Return at most ``MOST`` of `all_names`, evenly spaced."""
    names = all_names(folder, prefix, suffix)
    count = min(MOST, len(names))
    return [names[i * len(names) // count] for i in range(count)]


def read(folder: Path, keys: Sequence[str]) -> dict:
    """Return tensors of a checkpoint by key, float32 on the CPU."""
    import torch
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(folder / "tensors")
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in keys
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
