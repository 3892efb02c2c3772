"""Checkpoints: their counters, the EMA, the anchor, and the steps of AdamW between two of them."""

import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from scripts.audit.run import Run, read_json
from scripts.audit.statements import Audit, CannotCheck, Comparison, Inapplicable
from scripts.audit.updates import applied, strategy

TOPIC = "Checkpoints"
MOST = 200  # parameters that are read, of a large model
LARGEST = 2**30  # bytes of a file whose digest is recomputed
PART = 2**27  # bytes of parameters that are read together, in addition to the last of them
ROUNDING = 2e-5  # of float32, relative to the largest element of a tensor


def audit_checkpoints(run: Run, audit: Audit) -> None:
    text = "checkpoints are of this run, and their files have their digests"
    with audit.compare(TOPIC, text, "checkpoints/, run.json") as rows:
        record = read_json(run.folder / "run.json")
        for iteration, folder in run.checkpoints.items():
            where = f"checkpoint {iteration}"
            rows.equal(f"run of {where}", record["run"], read_json(folder / "state.json")["run"])
            for name, digest in read_json(folder / "digests.json").items():
                if not (folder / name).is_file():
                    rows.equal(f"{name} of {where}", "file", "no file")
                elif (folder / name).stat().st_size <= LARGEST:
                    rows.equal(f"{name} of {where}", digest, _digest(folder / name))
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


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _audit_average(run: Run, audit: Audit) -> None:
    text = "the EMA moves towards the policy by 1 - ema_decay in each update"
    with audit.compare(TOPIC, text, "checkpoints/", ROUNDING) as rows:
        decay = run.get("ema_decay", 0.0)
        if not decay:
            raise Inapplicable
        for before, after in one_update_apart(run):
            for names in chosen(after, "average."):
                old = read(before, [f"average.{name}" for name in names])
                new = read(
                    after, [f"{kind}.{name}" for name in names for kind in ("average", "policy")]
                )
                for name in names:
                    average, weights = new[f"average.{name}"], new[f"policy.{name}"]
                    expected = decay * old[f"average.{name}"] + (1 - decay) * weights
                    rows.number(f"{name}, {after.name}", 0.0, _distance(expected, average))


def _audit_anchor(run: Run, audit: Audit) -> None:
    text = "the anchor has the weights of the policy at its last refresh"
    with audit.compare(TOPIC, text, "checkpoints/, metrics.jsonl", ROUNDING) as rows:
        if not strategy(run).endswith("moving"):
            raise Inapplicable
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
            for names in chosen(folder, "anchor."):
                anchor = read(folder, [f"anchor.{name}" for name in names])
                policy = read(run.checkpoints[refreshed], [f"policy.{name}" for name in names])
                for name in names:
                    distance = _distance(policy[f"policy.{name}"], anchor[f"anchor.{name}"])
                    rows.number(f"{name}, checkpoint {iteration}", 0.0, distance)


def _audit_adam(run: Run, audit: Audit) -> None:
    """The gradient of an update follows from AdamW's first moments before and after it."""
    text = "weights and moments follow from AdamW's equations, with the recorded learning rate"
    rates = {}
    for line in run.all_lines:
        for update in applied(line):
            rates[update["update"]] = update
    with audit.compare(TOPIC, text, "checkpoints/, audit.jsonl", 1e-4) as rows:
        norms: dict[int, float] = {}
        complete = True
        for before, after in one_update_apart(run):
            number = json.loads((after / "state.json").read_text())["update"]
            if number not in rates:
                raise CannotCheck("audit.jsonl has no line of this update")
            lr = rates[number]["lr"]
            stored = all_names(after, "optimizer.", ".exp_avg")
            if not stored:
                raise CannotCheck("no trained parameter has the moments of AdamW")
            # Muon keeps the momentum of its parameters alone, from which no gradient follows
            others = all_names(after, "optimizer.", ".momentum")
            complete = len(stored) <= MOST and not others
            for names in chosen(after, "optimizer.", ".exp_avg"):
                kinds = ("exp_avg", "exp_avg_sq", "step")
                keys = [f"policy.{name}" for name in names]
                keys += [f"optimizer.{name}.{kind}" for name in names for kind in kinds]
                old, new = read(before, keys), read(after, keys)
                for name in names:
                    state = Adam.of(name, old), Adam.of(name, new)
                    where = f"{name}, update {number}"
                    square = _check_step(rows, where, *state, lr, run)
                    norms[number] = norms.get(number, 0.0) + square
        if complete:
            limit = run.get("max_grad_norm", 1.0)
            for number, square in norms.items():
                expected = min(limit, rates[number]["grad_norm"])
                found = math.sqrt(square)
                rows.number(f"norm of the gradient of update {number}", 1.0, found / expected)


class Adam(NamedTuple):
    """A parameter and its moments in a checkpoint, float64."""

    weights: Any
    mean: Any
    square: Any
    step: Any

    @classmethod
    def of(cls, name: str, tensors: dict) -> "Adam":
        kinds = ("exp_avg", "exp_avg_sq", "step")
        keys = [f"policy.{name}", *(f"optimizer.{name}.{kind}" for kind in kinds)]
        return cls(*(tensors[key].double() for key in keys))


def _check_step(rows: Comparison, where: str, old: Adam, new: Adam, lr: float, run: Run) -> float:
    """Compare a step of AdamW with its equations and return the square of its gradient's norm."""
    first, second = betas(run)
    gradient = (new.mean - first * old.mean) / (1 - first)
    expected = second * old.square + (1 - second) * gradient**2
    rows.number(f"second moment of {where}", 0.0, _distance(expected, new.square))
    count = float(new.step)
    change = new.mean / (1 - first**count)
    change /= (new.square / (1 - second**count)).sqrt() + run.get("adam_epsilon", 1e-8)
    weights = old.weights * (1 - lr * run.get("weight_decay", 0.01)) - lr * change
    rows.number(f"weights of {where}", 0.0, _moved(weights, new.weights, old.weights))
    return float((gradient**2).sum())


def betas(run: Run) -> tuple[float, float]:
    """Return the decays of AdamW's moments, which runs of earlier versions have one by one."""
    first, second = run.get("betas", (0.9, 0.999))
    return run.get("adam_beta1", first), run.get("adam_beta2", second)


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
    keys = _reader(folder)[1]
    return [
        key.removeprefix(prefix).removesuffix(suffix)
        for key in keys
        if key.startswith(prefix) and key.endswith(suffix)
    ]


def chosen(folder: Path, prefix: str, suffix: str = "") -> list[list[str]]:
    """Return at most ``MOST`` of `all_names`, evenly spaced, in parts that are read together."""
    names = all_names(folder, prefix, suffix)
    stored = _reader(folder)[1]
    count = min(MOST, len(names))
    parts: list[list[str]] = []
    size = PART
    for i in range(count):
        name = names[i * len(names) // count]
        if size >= PART:
            parts.append([])
            size = 0
        parts[-1].append(name)
        tensor = stored[f"{prefix}{name}{suffix}"]
        size += tensor.size.numel() * tensor.properties.dtype.itemsize
    return parts


def read(folder: Path, keys: Sequence[str]) -> dict:
    """Return tensors of a checkpoint by key, on the CPU."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    reader, stored = _reader(folder)
    tensors = {
        key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in keys
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        try:
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # which is no Exception
            raise CannotCheck(f"{folder} cannot be read: it is damaged") from error
    return tensors


@cache
def _reader(folder: Path) -> tuple:
    """Return the reader of a checkpoint, and what is stored of each tensor by key."""
    from torch.distributed.checkpoint import FileSystemReader

    reader = FileSystemReader(folder / "tensors")
    return reader, reader.read_metadata().state_dict_metadata
