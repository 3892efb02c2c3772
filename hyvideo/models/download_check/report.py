"""Report on a checkpoint folder, part by part, and on what can be run with it; nothing is loaded.

Every part is looked at by itself, so the report helps in the middle of a download. ``scripts/check_checkpoints.py``
prints it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from hyvideo.data.outside import align_columns
from hyvideo.data.templates import fill
from hyvideo.models import fit_checks, loading
from hyvideo.models.download_check.integrity import flaw_of, size_of, unfinished_bytes
from hyvideo.models.download_check.parts import Part, Use, parts_of
from hyvideo.models.encoders import class_problems
from hyvideo.models.family import Family
from hyvideo.models.reward_models.videoalign.checkpoint import find_checkpoint
from hyvideo.models.versions import UNSUPPORTED
from hyvideo.models.weight_files import Folder, problems_of, read_pickle, shapes_of, shortened, weight_paths

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
        others = [row for row in self.rows if not row.part.is_transformer]
        tasks = {"t2v", "i2v"}.intersection(*[set(row.part.uses) for row in others if "t2v" in row.part.uses])
        core = [row for row in others if tasks <= set(row.part.uses)]
        return any(row.is_ok for row in self.rows if row.part.is_transformer) and all(row.is_ok for row in core)


def report(root: str | Path) -> CheckpointReport:
    """The report of a folder, in the original layout or in diffusers'."""
    root = Path(root)
    family, parts = parts_of(root)
    return CheckpointReport(tuple(_examine(part, root, family, parts) for part in parts))


def _examine(part: Part, root: Path, family: Family, parts: list[Part]) -> Row:
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
    check = CHECKS.get(part.check) or (lambda root, _: family_problems(root, family, part.check, parts))
    misfits = problems_of(lambda: check(root, part.folder)) if part.check else []
    return Row(part, "does not fit" if misfits else "ok", size, tuple(misfits))


def _files(part: Part, folder: Path) -> tuple[list[Path], list[str]]:
    """The part's files that are there, and a sentence for each that is not."""
    present: dict[Path, None] = {}  # a set in order
    problems = []
    for patterns in (alternatives.split("|") for alternatives in part.files):
        paths = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
        if not paths:
            problems.append(f"{part.folder} has no {' or '.join(patterns)}")
        for index in [path for path in paths if path.name.endswith(".index.json")]:
            try:
                paths += weight_paths(Folder(folder, part.folder), index.name.partition(".")[0])
            except ValueError as error:
                problems.append(str(error))
        present |= dict.fromkeys(paths)
    return list(present), problems


def transformer_problems(root: Path, folder: str) -> list[str]:
    """Problems of ``transformer/<version>``, or of the one transformer of the diffusers layout."""
    version = folder.partition("/")[2] or None
    if version in UNSUPPORTED:
        return [f"this version is not supported: {UNSUPPORTED[version]}"]
    problems = fit_checks.model_problems(loading.transformer_folder(root, version))
    return problems + fit_checks.pipeline_problems(root)


def videoalign_problems(root: Path, folder: str) -> list[str]:
    """Problems of the newest VideoAlign checkpoint: its settings, the head, and the LoRA's rank.

    The base model's config is not part of the download, so the other shapes are compared when it is loaded.
    """
    checkpoint = find_checkpoint(root / folder)
    whole = checkpoint.folder / "model.pth"
    weights = whole if whole.is_file() else checkpoint.folder / "non_lora_state_dict.pth"
    shapes = shapes_of(read_pickle(weights, "VideoAlign", device="meta"))
    heads = {name: 1 for name in shapes if name.endswith("rm_head.weight")}
    if not heads:
        return [f"{weights} has no tensor rm_head.weight among {len(shapes)}"]
    rows = heads | {name: checkpoint.settings.lora_rank for name in shapes if ".lora_A." in name}
    return shortened(
        [
            f"tensor {name!r} in {weights} has shape {shapes[name]}, model_config.json asks for {number} rows"
            for name, number in rows.items()
            if shapes[name][0] != number
        ]
    )


def family_problems(root: Path, family: Family, kind: str, parts: list[Part]) -> list[str]:
    """Problems of the VAE or of a condition's encoder, whose tokenizer, another download, may be missing."""
    if kind == "vae":
        return fit_checks.model_problems(loading.vae_folder(root), "vae", family=family)
    of_kind = next(part for part in family.parts if part.kind == kind)
    tokenizers = [p.folder for p in parts if p.folder in of_kind.folders and "tokenizer_config.json" in p.files]
    has_tokenizer = any((root / folder / "tokenizer_config.json").is_file() for folder in tokenizers)
    return of_kind.problems(root, True) if has_tokenizer or of_kind.is_file else []


# What keeps whole files from fitting the model they are for, from headers alone: the loaders' own checks where there
# are some, so that this report and the start of a run agree. The others are the family's: `family_problems`.
CHECKS: dict[str | None, Callable[[Path, str], list[str]]] = {
    "transformer": transformer_problems,
    "videoalign": videoalign_problems,
    "clip": lambda root, folder: class_problems("CLIPModel", Folder(root / folder, "CLIP")),
}


def lines(checkpoints: CheckpointReport) -> list[str]:
    """The report to read: the table, what is wrong, the downloads that would help, and what can be run."""
    rows = checkpoints.rows
    cells = [
        (row.part.name, row.part.folder, row.state, _bytes(row.size), ", ".join(row.part.uses) or "nothing here")
        for row in rows
    ]
    uses = {use: name for use, name in _NAMES.items() if any(use in row.part.uses for row in rows)}
    return fill(
        Path(__file__).with_name("report.txt.jinja"),
        rows=rows,
        table=align_columns([("part", "folder", "state", "size", "needed for"), *cells]),  # with the missing parts
        lacking={name: ", ".join(row.part.name for row in checkpoints.lacking(use)) for use, name in uses.items()},
    ).splitlines()


def _bytes(size: int) -> str:
    """A size as the hubs count, in powers of a thousand: ``33.3GB``."""
    return tqdm.format_sizeof(size, "B") if size else "-"
