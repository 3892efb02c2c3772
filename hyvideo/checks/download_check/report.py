"""Report on the state of each part of a checkpoint folder, also during a download.

No weights are loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tqdm import tqdm

from hyvideo.checks.download_check.parts import Part, Use, parts_of
from hyvideo.data.text import align_columns
from hyvideo.models import fit_checks
from hyvideo.models.encoders import class_problems
from hyvideo.models.family import Family
from hyvideo.models.versions import SUPER_RESOLUTION, UNSUPPORTED
from hyvideo.models.weight_files import Folder, problems_of, read_pickle, size_of
from hyvideo.rewards.videoalign.checkpoint import LABEL, find_checkpoint

# Names of uses in the summary; other uses are called what they are.
_NAMES = {
    "t2v": "text-to-video",
    "i2v": "image-to-video",
    "reward": "VideoAlign reward",
    "metrics": "CLIPScore and PickScore",
}


@dataclass(frozen=True)
class Row:
    """State of a part on disk."""

    part: Part
    state: Literal["ok", "missing", "incomplete", "unusable"]
    size: int  # bytes on disk
    problems: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        return self.state == "ok"


@dataclass(frozen=True)
class CheckpointReport:
    """The state of every part of a checkpoint folder."""

    rows: tuple[Row, ...]

    @property
    def uses(self) -> list[Use]:
        return [use for use in get_args(Use) if any(use in row.part.uses for row in self.rows)]

    def missing_for(self, use: Use) -> list[Row]:
        """Return the parts that `use` still needs, empty if it can run.

        One transformer is enough.
        """
        rows = [row for row in self.rows if use in row.part.uses]
        if any(row.is_ok for row in rows if row.part.is_transformer):
            rows = [row for row in rows if not row.part.is_transformer]
        return [row for row in rows if not row.is_ok]

    @property
    def has_a_model(self) -> bool:
        """True if all parts of text-to-video or of image-to-video are complete."""
        return any(not self.missing_for(use) for use in self.uses if use in ("t2v", "i2v"))


def report(root: str | Path) -> CheckpointReport:
    """Return the report on a checkpoint folder in the original layout or in diffusers' layout."""
    root = Path(root)
    family, parts = parts_of(root)
    return CheckpointReport(tuple(_examine(part, root, family) for part in parts))


def _examine(part: Part, root: Path, family: Family) -> Row:
    folder = root / part.folder
    size = size_of(folder)
    names = [alternatives.split("|") for alternatives in part.files]
    problems = [
        f"{part.folder} has no {' or '.join(patterns)}"
        for patterns in names
        if not any(path.is_file() for pattern in patterns for path in folder.glob(pattern))
    ]
    if problems:
        return Row(part, "incomplete" if size else "missing", size, tuple(problems))
    problems = problems_of(lambda: unusable_files(part, root, family))
    return Row(part, "unusable" if problems else "ok", size, tuple(problems))


def unusable_files(part: Part, root: Path, family: Family) -> list[str]:
    """Return the reasons why a complete part cannot be loaded, such as corrupted files, from
    headers alone.

    Most checks are also used for loading, so that this report agrees with the start of a run.
    """
    folder = Folder(root / part.folder, part.name)
    if part.check is None:
        return []
    if part.check == "transformer":
        if (version := folder.path.name) in UNSUPPORTED and version not in SUPER_RESOLUTION:
            return [f"this version is not supported: {UNSUPPORTED[version]}"]
        return fit_checks.model_problems(folder) + fit_checks.pipeline_problems(root)
    if part.check in ("vae", "upsampler"):
        return fit_checks.model_problems(folder, part.check, family=family)
    if part.check == "videoalign":
        return videoalign_problems(folder.path)
    if part.check == "clip":
        return class_problems("CLIPModel", folder)
    encoder = next(encoder for encoder in family.parts if encoder.kind == part.check)
    return encoder.problems(root, True)


def videoalign_problems(folder: Path) -> list[str]:
    """Return the problems of the newest VideoAlign checkpoint: its settings and reward head."""
    checkpoint = find_checkpoint(folder).folder
    whole = checkpoint / "model.pth"
    path = whole if whole.is_file() else checkpoint / "non_lora_state_dict.pth"
    tensors = read_pickle(path, LABEL, device="meta")
    if any(
        name.endswith("rm_head.weight") and len(tensor) == 1 for name, tensor in tensors.items()
    ):
        return []
    return [
        f"{path} must have a tensor rm_head.weight with one row; it is not a supported reward model"
    ]


def lines(checkpoints: CheckpointReport) -> list[str]:
    """Return the lines of the report: table, problems, download commands, and what can run."""
    rows = checkpoints.rows
    cells = [
        (
            row.part.name,
            row.part.folder,
            row.state,
            _bytes(row.size),
            ", ".join(row.part.uses) or "not used",
        )
        for row in rows
    ]
    table = align_columns([("part", "folder", "state", "size", "needed for"), *cells])
    return [*table, "", *_problems(rows), *_downloads(rows), "", _summary(checkpoints)]


def _problems(rows: Sequence[Row]) -> list[str]:
    """Return a line for each problem of a part that is on disk."""
    found = []
    for row in rows:
        if row.state in ("incomplete", "unusable"):
            found += [f"{row.part.name}, {row.state}: {problem}" for problem in row.problems]
    return found


def _downloads(rows: Sequence[Row]) -> list[str]:
    """Return the command that downloads each part that something needs and that is not ok; empty if
    all are.
    """
    needed = [row.part for row in rows if row.part.uses and not row.is_ok]
    if not needed:
        return []
    found = [
        "",
        "Download commands for the parts that are not ok (an interrupted download resumes; delete "
        "unusable files first):",
    ]
    for part in needed:
        size = f", {part.size}" if part.size else ""
        found.append(f"  # {part.name}, for {', '.join(part.uses)}{size}")
        found.append(f"  {part.download}")
    return found


def _summary(checkpoints: CheckpointReport) -> str:
    """Return a sentence on what can run and, if something cannot, one on what is missing for it."""
    can_run = []
    cannot_run = []
    for use in checkpoints.uses:
        name = _NAMES.get(use, use)
        missing = checkpoints.missing_for(use)
        if missing:
            cannot_run.append(f"{name} (missing: {', '.join(row.part.name for row in missing)})")
        else:
            can_run.append(name)
    text = f"Can run: {', '.join(can_run) or 'nothing'}."
    return f"{text} Cannot run: {'; '.join(cannot_run)}." if cannot_run else text


def _bytes(size: int) -> str:
    """Format a size in decimal units, as model hubs do: ``33.3GB``."""
    return tqdm.format_sizeof(size, "B") if size else "-"
