"""The parts of a checkpoint folder: where each lies, which files it needs, what for, and how it is downloaded.

``parts.yaml`` lists them. The layouts have different parts; the reward and the metrics lie beside either.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from hyvideo.models.loading import read_task

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


def parts_of(root: Path) -> list[Part]:
    """The parts to look for, after the layout that is there; the original one where nothing tells."""
    if (root / "model_index.json").is_file() or (root / "transformer" / "config.json").is_file():
        return _parts(root, "diffusers", task=_task(root, None)) + _parts(root, "either")
    # Of some versions nothing is there but an unfinished download.
    folders = (root / "transformer", root / ".cache/huggingface/download/transformer")
    tasks = {p.name: _task(root, p.name) for folder in folders for p in sorted(folder.glob("*")) if p.is_dir()}
    # One version of each task is named where there is none.
    tasks |= {f"480p_{task}": task for task in ("t2v", "i2v") if task not in tasks.values()}
    transformers = [_parts(root, "original transformer", version=name, task=task)[0] for name, task in tasks.items()]
    return transformers + _parts(root, "original") + _parts(root, "either")


def _parts(root: Path, group: str, **names: str) -> list[Part]:
    """The parts of a group in the table, with names in the place of {version}, {task} and {root}."""
    rows = json.dumps(yaml.safe_load(Path(__file__).with_name("parts.yaml").read_text())[group])
    for name, value in (names | {"root": shlex.quote(str(root))}).items():
        rows = rows.replace(f"{{{name}}}", json.dumps(value)[1:-1])
    return [Part(**row) for row in json.loads(rows)]


def _task(root: Path, version: str | None) -> str:
    """Task of a transformer: as its files say, or as its name suggests."""
    try:
        task = read_task(root, version)
    except ValueError:  # reported with its part
        task = None
    return task if task in ("t2v", "i2v") else "i2v" if "i2v" in (version or "") else "t2v"
