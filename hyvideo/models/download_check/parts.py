"""The parts of a checkpoint folder: where each lies, which files it needs, what for, and where it comes from.

``parts.yaml`` lists them. The layouts have different parts; the reward and the metrics lie beside either.
"""

import functools
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from hyvideo.models.loading import read_task
from hyvideo.models.versions import RELEASED

Use = Literal["t2v", "i2v", "quoted text", "reward", "metrics"]


@dataclass(frozen=True)
class Part:
    """A thing to download; the fields are those of ``parts.yaml``."""

    name: str
    folder: str
    files: tuple[str, ...]
    hub: str
    check: str | None = None
    uses: tuple[Use, ...] = ()
    hub_files: tuple[str, ...] = ()
    hub_folder: str | None = None
    from_modelscope: bool = False
    size: str = ""

    @property
    def is_transformer(self) -> bool:
        return self.folder.split("/")[0] == "transformer"

    def command(self, root: Path) -> str:
        """The download, for a shell."""
        folder = self.folder if self.hub_folder is None else self.hub_folder
        target = shlex.quote(str(root / folder))
        if self.from_modelscope:
            return f"modelscope download --model {self.hub} --local_dir {target}"
        patterns = "".join(f' --include "{name}"' if "*" in name else f" {name}" for name in self.hub_files)
        return f"hf download {self.hub}{patterns} --local-dir {target}"


def parts_of(root: Path) -> list[Part]:
    """The parts to look for, after the layout that is there; the original one where nothing tells."""
    is_diffusers = (root / "model_index.json").is_file() or (root / "transformer" / "config.json").is_file()
    layout = _diffusers_parts(root) if is_diffusers else _original_parts(root)
    return [*layout, *(_part(row) for row in _table()["either"])]


def _original_parts(root: Path) -> list[Part]:
    transformer, *others = _table()["original"]
    # Of some versions nothing is there but an unfinished download.
    folders = (root / "transformer", root / ".cache/huggingface/download/transformer")
    versions = list(dict.fromkeys(p.name for folder in folders for p in sorted(folder.glob("*")) if p.is_dir()))
    tasks = {version: _task(root, version) for version in versions}
    # One version of each task is named where there is none.
    tasks |= {f"480p_{task}": task for task in ("t2v", "i2v") if task not in tasks.values()}
    return [*(_part(transformer, version=v, task=task) for v, task in tasks.items()), *map(_part, others)]


def _diffusers_parts(root: Path) -> list[Part]:
    task = _task(root, None)
    hub = {"hub": f"hunyuanvideo-community/HunyuanVideo-1.5-480p_{task}", "hub_folder": ""}
    return [_part(row | hub | {"hub_files": [f"{row['folder']}/*"]}, task=task) for row in _table()["diffusers"]]


@functools.cache
def _table() -> dict[str, list[dict[str, Any]]]:
    return yaml.safe_load(Path(__file__).with_name("parts.yaml").read_text())


def _part(row: dict[str, Any], **names: str) -> Part:
    """The part of a row of the table, with names in the place of {version} and {task}."""

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(filled(item) for item in value)
        return value.format(**names) if isinstance(value, str) else value

    return Part(**{key: filled(value) for key, value in row.items()})


def _task(root: Path, version: str | None) -> str:
    """Task of a transformer: of the version, of its files, or as its name suggests."""
    if version in RELEASED:
        return RELEASED[version].task
    try:
        task = read_task(root, version)
    except ValueError:  # reported with its part
        task = None
    return task if task in ("t2v", "i2v") else "i2v" if "i2v" in (version or "") else "t2v"
