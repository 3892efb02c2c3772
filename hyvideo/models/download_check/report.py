"""Report on a checkpoint folder, part by part, and on what can be run with it; nothing is loaded.

Every part is looked at by itself, so the report helps in the middle of a download. ``scripts/check_checkpoints.py``
prints it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from hyvideo.models.download_check.fit import CHECKS
from hyvideo.models.download_check.integrity import flaw_of, shards, size_of, unfinished_bytes
from hyvideo.models.download_check.parts import Part, Use, parts_of
from hyvideo.models.weight_files import problems_of

State = Literal["ok", "missing", "incomplete", "does not fit"]

_NAMES: dict[Use, str] = {
    "t2v": "text-to-video",
    "i2v": "image-to-video",
    "quoted text": "quoted text",
    "reward": "VideoAlign reward",
    "metrics": "CLIPScore and PickScore",
}


@dataclass(frozen=True)
class Row:
    """State of a part on the disk."""

    part: Part
    state: State
    size: int  # bytes that are there
    problems: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        return self.state == "ok"


@dataclass(frozen=True)
class CheckpointReport:
    """The state of every part of a checkpoint folder."""

    root: Path
    rows: tuple[Row, ...]

    def lacking(self, use: Use) -> list[Row]:
        """Parts that keep `use` from running; none when it can. Of the transformers one is enough."""
        rows = [row for row in self.rows if use in row.part.uses]
        transformers = [row for row in rows if row.part.is_transformer]
        if any(row.is_ok for row in transformers):
            transformers = []
        elif not transformers and use in ("t2v", "i2v"):
            # The one of a diffusers pipeline is for the other task.
            transformers = [row for row in self.rows if row.part.is_transformer]
        return transformers + [row for row in rows if not row.part.is_transformer and not row.is_ok]

    @property
    def has_a_model(self) -> bool:
        """Claims that a transformer of either task, the VAE and the text encoder are complete."""
        core = [row for row in self.rows if {"t2v", "i2v"} <= set(row.part.uses)]
        return any(row.is_ok for row in self.rows if row.part.is_transformer) and all(row.is_ok for row in core)


def report(root: str | Path) -> CheckpointReport:
    """The report of a folder, in the original layout or in diffusers'."""
    root = Path(root)
    return CheckpointReport(root, tuple(_examine(part, root) for part in parts_of(root)))


def _examine(part: Part, root: Path) -> Row:
    folder = root / part.folder
    size = size_of(folder)
    present, problems = _files(part, folder)
    problems += [f"{path.relative_to(root)} {flaw}" for path in present if (flaw := flaw_of(path))]
    if problems:
        unfinished = unfinished_bytes(root, folder)
        if unfinished is not None:
            problems.insert(0, f"a download is running or was broken off: {_bytes(unfinished)} so far")
        state = "missing" if not present and unfinished is None else "incomplete"
        return Row(part, state, size, tuple(problems))
    problems = problems_of(lambda: CHECKS[part.check](root, part.folder)) if part.check else []
    return Row(part, "does not fit" if problems else "ok", size, tuple(problems))


def _files(part: Part, folder: Path) -> tuple[list[Path], list[str]]:
    """The part's files that are there, and a sentence for each that is not."""
    present: dict[Path, None] = {}  # a set in order
    problems = []
    for patterns in (alternatives.split("|") for alternatives in part.files):
        paths = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
        if not paths:
            problems.append(f"{part.folder} has no {' or '.join(patterns)}")
        for path in paths:
            named = shards(path) if path.name.endswith(".index.json") else []
            present |= dict.fromkeys([path, *(shard for shard in named if shard.is_file())])
            missing = [shard.name for shard in named if not shard.is_file()]
            problems += [f"{part.folder} has no {name}, which {path.name} names" for name in missing]
    return list(present), problems


def lines(checkpoints: CheckpointReport) -> list[str]:
    """The report to read: the table, what is wrong, the downloads that would help, and what can be run."""
    rows = checkpoints.rows
    cells = [("part", "folder", "state", "size", "needed for")]
    for row in rows:
        uses = ", ".join(row.part.uses) or "nothing here"
        cells.append((row.part.name, row.part.folder, row.state, _bytes(row.size), uses))
    widths = [max(map(len, column)) for column in zip(*cells)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    # A missing part stands in the table.
    troubled = [row for row in rows if row.state in ("incomplete", "does not fit")]
    text += ["", *(f"{row.part.name}, {row.state}: {problem}" for row in troubled for problem in row.problems)]
    if needed := [row.part for row in rows if not row.is_ok and row.part.uses]:
        hint = "a download goes on where it was broken off; take away first what does not fit"
        text += ["", f"To get what is not ok ({hint}):"]
    for part in needed:
        size = f", {part.size}" if part.size else ""
        text += [f"  # {part.name}, for {', '.join(part.uses)}{size}", f"  {part.command(checkpoints.root)}"]
    lacking = {name: ", ".join(row.part.name for row in checkpoints.lacking(use)) for use, name in _NAMES.items()}
    can = ", ".join(name for name, parts in lacking.items() if not parts)
    cannot = "; ".join(f"{name} (lacks {parts})" for name, parts in lacking.items() if parts)
    return [*text, "", f"Can be run: {can or 'nothing'}." + (f" Not: {cannot}." if cannot else "")]


def _bytes(size: int) -> str:
    """A size as the hubs count, in powers of a thousand: ``33.3GB``."""
    return tqdm.format_sizeof(size, "B") if size else "-"
