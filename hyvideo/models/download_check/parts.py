"""The parts of a checkpoint folder: where each lies, which files it needs, what for, and how it is downloaded.

A family's ``parts.yaml`` lists them for each layout; the reward and the metrics, in the one here, serve all.
"""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from hyvideo.models.family import Family, families
from hyvideo.models.loading import read_family, read_task
from hyvideo.models.versions import RELEASED, version_defaults
from hyvideo.models.weight_files import Folder

Use = Literal["t2v", "i2v", "quoted text", "reward", "metrics"]


@dataclass(frozen=True)
class Part:
    """A thing to download; the fields are those of ``parts.yaml``."""

    name: str
    folder: str
    files: list[str]
    download: str
    check: str | None = None
    uses: Sequence[Use] = ()
    size: str = ""

    @property
    def is_transformer(self) -> bool:
        return self.folder.split("/")[0] == "transformer"


def parts_of(root: Path) -> tuple[Family, list[Part]]:
    """The family of models in a folder and its parts to look for, after the layout that is there.

    Where nothing tells, they are those of the first family's original layout.
    """
    family = _family(root)
    if (root / "model_index.json").is_file() or (root / "transformer" / "config.json").is_file():
        return family, _parts(root, family, "diffusers", task=_task(root, None)) + _parts(root)
    # Of some versions nothing is there but an unfinished download.
    folders = (root / "transformer", root / ".cache/huggingface/download/transformer")
    tasks = {p.name: _task(root, p.name) for folder in folders for p in sorted(folder.glob("*")) if p.is_dir()}
    # One version of each task is named where there is none.
    for version in (one for one in RELEASED.values() if one.family == family.name):
        if version.task not in tasks.values():
            tasks[version.name] = version.task
    group = "original transformer"
    transformers = [_parts(root, family, group, version=name, task=task)[0] for name, task in tasks.items()]
    return family, transformers + _parts(root, family, "original") + _parts(root)


def _family(root: Path) -> Family:
    """Family of the folder's transformer; the first one where there is none that can be read."""
    for folder in (root / "transformer", *sorted((root / "transformer").glob("*"))):
        with suppress(ValueError):
            return read_family(Folder(folder, "transformer"))
    return families()[0]


def _parts(root: Path, family: Family | None = None, group: str = "", **names: str) -> list[Part]:
    """The parts of a family's group, or those for all families, with names for {version}, {task} and {root}."""
    folder = Path(__file__).parents[1] / family.name if family else Path(__file__).parent
    table = yaml.safe_load((folder / "parts.yaml").read_text())
    rows = json.dumps(table[group] if family else table)
    for name, value in (names | {"root": shlex.quote(str(root))}).items():
        rows = rows.replace(f"{{{name}}}", json.dumps(value)[1:-1])
    return [Part(**row) for row in json.loads(rows)]


def _task(root: Path, version: str | None) -> str:
    """Task of a transformer: as its files say, the table of versions, or its name."""
    try:
        task = read_task(root, version)
    except ValueError:  # reported with its part
        task = None
    if task not in ("t2v", "i2v"):
        task = version_defaults(version).task
    return task or ("i2v" if "i2v" in (version or "") else "t2v")
