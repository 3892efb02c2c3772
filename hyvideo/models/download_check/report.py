"""Report on the state of each part of a checkpoint folder, also during a download. No weights are loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tqdm import tqdm

from hyvideo.data.outside import align_columns
from hyvideo.data.templates import fill
from hyvideo.models import fit_checks, loading
from hyvideo.models.download_check.integrity import file_problem, size_of, unfinished_bytes
from hyvideo.models.download_check.parts import Part, Use, parts_of
from hyvideo.models.encoders import class_problems
from hyvideo.models.family import Family
from hyvideo.models.reward_models.videoalign.checkpoint import find_checkpoint
from hyvideo.models.versions import SUPER_RESOLUTION, UNSUPPORTED
from hyvideo.models.weight_files import Folder, problems_of, read_pickle, shapes_of, truncate, weight_paths

State = Literal["ok", "missing", "incomplete", "does not fit"]


@dataclass(frozen=True)
class Row:
    """State of a part on disk."""

    part: Part
    state: State
    size: int  # bytes on disk
    problems: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        return self.state == "ok"


@dataclass(frozen=True)
class CheckpointReport:
    """The state of every part of a checkpoint folder."""

    rows: tuple[Row, ...]

    def missing_for(self, use: Use) -> list[Row]:
        """Return the parts that `use` still needs, empty if it can run. One transformer is enough."""
        rows = [row for row in self.rows if use in row.part.uses]
        transformers = [row for row in rows if row.part.is_transformer]
        if any(row.is_ok for row in transformers):
            transformers = []
        elif not transformers and use in ("t2v", "i2v"):
            # The transformer of a diffusers pipeline is for the other task.
            transformers = [row for row in self.rows if row.part.is_transformer]
        return transformers + [row for row in rows if not row.part.is_transformer and not row.is_ok]

    @property
    def has_a_model(self) -> bool:
        """True if a transformer, the VAE and the text encoder are complete, for either task."""
        rows = [row for row in self.rows if not row.part.is_transformer]
        tasks = {"t2v", "i2v"}.intersection(*[set(row.part.uses) for row in rows if "t2v" in row.part.uses])
        required = [row for row in rows if tasks <= set(row.part.uses)]
        return any(row.is_ok for row in self.rows if row.part.is_transformer) and all(row.is_ok for row in required)


def report(root: str | Path) -> CheckpointReport:
    """Return the report on a checkpoint folder in the original layout or in diffusers' layout."""
    root = Path(root)
    family, parts = parts_of(root)
    return CheckpointReport(tuple(_examine(part, root, family, parts) for part in parts))


def _examine(part: Part, root: Path, family: Family, parts: list[Part]) -> Row:
    folder = root / part.folder
    size = size_of(folder)
    present, problems = _files(part, folder)
    problems += [f"{path.relative_to(root)} {problem}" for path in present if (problem := file_problem(path))]
    if problems:
        unfinished = unfinished_bytes(root, folder)
        if unfinished is not None:
            problems.insert(0, f"the download is still running or was interrupted after {_bytes(unfinished)}")
        state = "missing" if not present and unfinished is None else "incomplete"
        return Row(part, state, size, tuple(problems))
    check = CHECKS.get(part.check) or (lambda root, _: family_problems(root, family, part, parts))
    misfits = problems_of(lambda: check(root, part.folder)) if part.check else []
    return Row(part, "does not fit" if misfits else "ok", size, tuple(misfits))


def _files(part: Part, folder: Path) -> tuple[list[Path], list[str]]:
    """Return the existing files of the part, and a problem for each missing file."""
    present: dict[Path, None] = {}  # an ordered set
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
    """Return the problems of ``transformer/<version>``, or of the single transformer of the diffusers layout."""
    version = folder.partition("/")[2] or None
    if version in UNSUPPORTED and version not in SUPER_RESOLUTION:
        return [f"this version is not supported: {UNSUPPORTED[version]}"]
    problems = fit_checks.model_problems(loading.transformer_folder(root, version))
    return problems + fit_checks.pipeline_problems(root)


def videoalign_problems(root: Path, folder: str) -> list[str]:
    """Return the problems of the newest VideoAlign checkpoint: its settings, reward head and LoRA rank."""
    checkpoint = find_checkpoint(root / folder)
    whole = checkpoint.folder / "model.pth"
    weights = whole if whole.is_file() else checkpoint.folder / "non_lora_state_dict.pth"
    shapes = shapes_of(read_pickle(weights, "VideoAlign", device="meta"))
    heads = {name: 1 for name in shapes if name.endswith("rm_head.weight")}
    if not heads:
        return [f"{weights} has no tensor rm_head.weight among its {len(shapes)} tensors; it is not a reward model"]
    rows = heads | {name: checkpoint.settings.lora_rank for name in shapes if ".lora_A." in name}
    return truncate(
        [
            f"tensor {name!r} in {weights} has shape {shapes[name]}, but model_config.json requires {number} rows"
            for name, number in rows.items()
            if shapes[name][0] != number
        ]
    )


def family_problems(root: Path, family: Family, part: Part, parts: list[Part]) -> list[str]:
    """Return the problems of the VAE, an upsampler or an encoder, which is checked once its tokenizer exists."""
    if part.check in ("vae", "upsampler"):
        return fit_checks.model_problems(Folder(root / part.folder, part.name), part.check, family=family)
    encoder = next(encoder for encoder in family.parts if encoder.kind == part.check)
    tokenizers = [p.folder for p in parts if p.folder in encoder.folders and "tokenizer_config.json" in p.files]
    has_tokenizer = any((root / folder / "tokenizer_config.json").is_file() for folder in tokenizers)
    return encoder.problems(root, True) if has_tokenizer or encoder.is_file else []


# Checks that complete files fit their model, from headers alone. Most are also used for loading, so that this report
# agrees with the start of a run. `family_problems` checks the other parts.
CHECKS: dict[str | None, Callable[[Path, str], list[str]]] = {
    "transformer": transformer_problems,
    "videoalign": videoalign_problems,
    "clip": lambda root, folder: class_problems("CLIPModel", Folder(root / folder, "CLIP")),
}


def lines(checkpoints: CheckpointReport) -> list[str]:
    """Return the lines of the report: table, problems, download commands, and what can run."""
    rows = checkpoints.rows
    cells = [
        (row.part.name, row.part.folder, row.state, _bytes(row.size), ", ".join(row.part.uses) or "not used")
        for row in rows
    ]
    uses = [use for use in get_args(Use) if any(use in row.part.uses for row in rows)]
    return fill(
        Path(__file__).with_name("report.txt.jinja"),
        rows=rows,
        table=align_columns([("part", "folder", "state", "size", "needed for"), *cells]),
        missing={use: ", ".join(row.part.name for row in checkpoints.missing_for(use)) for use in uses},
    ).splitlines()


def _bytes(size: int) -> str:
    """Format a size in decimal units, as model hubs do: ``33.3GB``."""
    return tqdm.format_sizeof(size, "B") if size else "-"
