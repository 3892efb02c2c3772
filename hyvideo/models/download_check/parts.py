"""The parts of a checkpoint folder: where each lies, which files it needs, what for, and where it comes from.

``parts.yaml`` lists them. The layouts have different parts; the reward and the metrics lie beside either.
"""

import json
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import yaml

from hyvideo.models.loading import read_task
from hyvideo.models.versions import RELEASED

Use = Literal["t2v", "i2v", "quoted text", "reward", "metrics"]


@dataclass(frozen=True)
class Part:
    """A thing to download; the fields are those of ``parts.yaml``."""

    name: str
    folder: str
    files: list[str]
    hub: str
    check: str | None = None
    uses: list[Use] = field(default_factory=list)
    hub_files: list[str] = field(default_factory=list)
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
    if not is_diffusers:
        return _original_parts(root) + _parts("either")
    layout = _parts("diffusers", task=_task(root, None))
    return [replace(part, hub_files=[f"{part.folder}/*"], hub_folder="") for part in layout] + _parts("either")


def _original_parts(root: Path) -> list[Part]:
    # Of some versions nothing is there but an unfinished download.
    folders = (root / "transformer", root / ".cache/huggingface/download/transformer")
    versions = list(dict.fromkeys(p.name for folder in folders for p in sorted(folder.glob("*")) if p.is_dir()))
    tasks = {version: _task(root, version) for version in versions}
    # One version of each task is named where there is none.
    tasks |= {f"480p_{task}": task for task in ("t2v", "i2v") if task not in tasks.values()}
    transformers = [_parts("original", version=version, task=task)[0] for version, task in tasks.items()]
    return transformers + _parts("original")[1:]


def _parts(layout: str, **names: str) -> list[Part]:
    """The parts of a layout in the table, with names in the place of {version} and {task}."""
    rows = json.dumps(yaml.safe_load(Path(__file__).with_name("parts.yaml").read_text())[layout])
    for name, value in names.items():
        rows = rows.replace(f"{{{name}}}", json.dumps(value)[1:-1])
    return [Part(**row) for row in json.loads(rows)]


def _task(root: Path, version: str | None) -> str:
    """Task of a transformer: of the version, of its files, or as its name suggests."""
    if version in RELEASED:
        return RELEASED[version].task
    try:
        task = read_task(root, version)
    except ValueError:  # reported with its part
        task = None
    return task if task in ("t2v", "i2v") else "i2v" if "i2v" in (version or "") else "t2v"
