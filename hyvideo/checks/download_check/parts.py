"""Parts of a checkpoint folder, each with its folder, files, uses and download command, from
``parts.yaml`` files.
"""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from hyvideo.models.family import Family, families
from hyvideo.models.fit_checks import family_of_folder
from hyvideo.models.loading import find_transformer, read_task
from hyvideo.models.registry import folder_of
from hyvideo.models.sizes import read_architecture
from hyvideo.models.versions import RELEASED, SUPER_RESOLUTION, version_defaults

Use = Literal["t2v", "i2v", "quoted text", "super-resolution", "reward", "metrics"]


@dataclass(frozen=True)
class Part:
    """A downloadable part; ``parts.yaml`` documents the fields."""

    name: str
    folder: str
    files: list[str]
    download: str
    check: str | None = None
    uses: Sequence[Use] = ()
    size: str = ""

    @property
    def is_transformer(self) -> bool:
        return (
            self.folder.split("/")[0] in ("transformer", ".")
            and "super-resolution" not in self.uses
        )


def parts_of(root: Path) -> tuple[Family, list[Part]]:
    """Return the family of a checkpoint folder, the first one if unknown, and the parts to check
    for its layout.
    """
    versions = [path.name for path in sorted((root / "transformer").glob("*")) if path.is_dir()]
    version = versions[0] if versions else root.resolve().name
    family = family_of_folder(root, version) or families()[0]
    table = _table(folder_of(family.name))
    common = _table(Path(__file__).parent)
    is_diffusers = (root / "model_index.json").is_file() or (
        root / "transformer" / "config.json"
    ).is_file()
    if is_diffusers or "original" not in table:
        task = _task(root, None if is_diffusers else version)
        rows = table["diffusers"] + table.get(f"diffusers {task}", [])
        parts = _parts(
            root,
            rows + common,
            task=task,
            repository=_repository(root, version, table.get("repositories", {})),
            transformer=_transformer_folder(
                root, version if versions and not is_diffusers else None
            ),
        )
        return family, parts
    tasks = {version: _task(root, version) for version in versions}
    # For a task without a transformer, list one released version as missing.
    for released in (version for version in RELEASED.values() if version.family == family.name):
        if released.task not in tasks.values():
            tasks[released.name] = released.task
    transformers = [
        part
        for name, task in tasks.items()
        for part in _parts(
            root,
            table.get(f"original {name}")
            or table.get(f"original {task}", table["original transformer"]),
            version=name,
            task=task,
        )
    ]
    return family, transformers + _parts(root, table["original"] + common)


def _transformer_folder(root: Path, version: str | None) -> str:
    """Return the transformer's folder in ``root``, which is ``.`` if its config.json is in ``root``
    itself.
    """
    if version is None and find_transformer(root) == root:
        return "."
    return f"transformer/{version}" if version else "transformer"


def _repository(root: Path, version: str, repositories: dict[int | str, str]) -> str:
    """Return the repository of the version, or of the transformer with as many heads as the
    folder's or as the version's.
    """
    if version in repositories:
        return repositories[version]
    with suppress(ValueError, KeyError):
        return repositories[read_architecture(root, version).num_attention_heads]
    return next(iter(repositories.values()), "")


def _table(folder: Path) -> Any:
    return yaml.safe_load((folder / "parts.yaml").read_text(encoding="utf-8"))


def _parts(root: Path, rows: list[dict[str, Any]], **names: str) -> list[Part]:
    """Return a part for each row, with {version}, {task}, {repository} and {root} filled in."""
    text = json.dumps(rows)
    for name, value in (names | {"root": shlex.quote(str(root))}).items():
        text = text.replace(f"{{{name}}}", json.dumps(value)[1:-1])
    return [Part(**row) for row in json.loads(text)]


def _task(root: Path, version: str | None) -> str:
    """Return the task of a transformer, from its files or the table of versions; t2v if neither has
    it.
    """
    if version in SUPER_RESOLUTION:
        return "super-resolution"
    with suppress(ValueError):  # reported as a problem of the transformer
        if (task := read_task(root, version)) in ("t2v", "i2v"):
            return task
    task = version_defaults(version).task
    return "i2v" if task == "i2v" else "t2v"  # ti2v needs the parts of t2v
