"""Parts of a checkpoint folder, each with its folder, files, uses and download command, from ``parts.yaml`` files."""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from hyvideo.models.family import Family, family_named
from hyvideo.models.loading import read_family, read_num_heads, read_task
from hyvideo.models.sizes import sizes_module
from hyvideo.models.versions import RELEASED, SUPER_RESOLUTION, version_defaults
from hyvideo.models.weight_files import Folder

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
        return self.folder.split("/")[0] == "transformer" and "super-resolution" not in self.uses


def parts_of(root: Path) -> tuple[Family, list[Part]]:
    """Return the family of a checkpoint folder, the first one if unknown, and the parts to check for its layout."""
    family = _family(root)
    table = _table(Path(__file__).parents[1] / family.name)
    common = _parts(root, _table(Path(__file__).parent))
    is_diffusers = (root / "model_index.json").is_file() or (root / "transformer" / "config.json").is_file()
    if is_diffusers or "original" not in table:
        repository = _repository(root, table.get("repositories", {}))
        versions = [] if is_diffusers else sorted(path.parent.name for path in root.glob("transformer/*/config.json"))
        names = {"repository": repository, "transformer": "/".join(["transformer", *versions[:1]])}
        return family, _parts(root, table["diffusers"], task=_task(root, None), **names) + common
    # Some versions may exist only as an unfinished download.
    folders = (root / "transformer", root / ".cache/huggingface/download/transformer")
    tasks = {p.name: _task(root, p.name) for folder in folders for p in sorted(folder.glob("*")) if p.is_dir()}
    # For a task without a transformer, list one released version as missing.
    for version in (version for version in RELEASED.values() if version.family == family.name):
        if version.task not in tasks.values():
            tasks[version.name] = version.task
    transformers = [
        part
        for name, task in tasks.items()
        for part in _parts(root, table.get(f"original {task}", table["original transformer"]), version=name, task=task)
    ]
    return family, transformers + _parts(root, table["original"]) + common


def _family(root: Path) -> Family:
    """Return the family of the folder's transformer or VAE or, without both, of the version in the folder's name."""
    for folder in (root / "transformer", *sorted((root / "transformer").glob("*"))):
        with suppress(ValueError):
            return read_family(Folder(folder, "transformer"))
    with suppress(ValueError):
        return read_family(Folder(root / "vae", "VAE"), "vae")
    return family_named(version_defaults(root.resolve().name).family)


def _repository(root: Path, repositories: dict[str, str]) -> str:
    """Return the repository of the version that matches the transformer's number of heads, else the folder's name."""
    with suppress(ValueError):
        heads = read_num_heads(root, None)
        for version, repository in repositories.items():
            if sizes_module(RELEASED[version].family).released(version).num_attention_heads == heads:
                return repository
    return repositories.get(root.resolve().name) or next(iter(repositories.values()), "")


def _table(folder: Path) -> Any:
    return yaml.safe_load((folder / "parts.yaml").read_text(encoding="utf-8"))


def _parts(root: Path, rows: list[dict[str, Any]], **names: str) -> list[Part]:
    """Return a part for each row, with {version}, {task}, {repository} and {root} filled in."""
    text = json.dumps(rows)
    for name, value in (names | {"root": shlex.quote(str(root))}).items():
        text = text.replace(f"{{{name}}}", json.dumps(value)[1:-1])
    return [Part(**row) for row in json.loads(text)]


def _task(root: Path, version: str | None) -> str:
    """Return the task of a transformer, from its files, the table of versions or its name."""
    if version in SUPER_RESOLUTION:
        return "super-resolution"
    try:
        task = read_task(root, version)
    except ValueError:  # reported as a problem of the transformer
        task = None
    if task not in ("t2v", "i2v"):
        task = version_defaults(version).task
    return task or ("i2v" if "i2v" in (version or "") else "t2v")
