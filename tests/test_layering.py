"""Which part of the project may import which: read from the source, nothing is imported."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "hyvideo").rglob("*.py"))
COMMUNICATION = ("torch.distributed", "hyvideo.distributed.mesh", "hyvideo.distributed.collectives")


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def imports(source: str, package: str = "hyvideo") -> set[str]:
    """Full names that a file imports anywhere in it: ``a.b`` and ``a.b.c`` for ``from a.b import c``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.add("torch.distributed")
    return found


def imports_of(file: Path) -> set[str]:
    return imports(file.read_text(encoding="utf-8"), name_of(file.parent))


def is_within(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def files_in(*folders: str) -> list:
    files = [file for file in FILES if is_within(name_of(file), *(f"hyvideo.{folder}" for folder in folders))]
    assert files
    return [pytest.param(file, id=name_of(file)) for file in files]


@pytest.mark.parametrize(
    "source, name",
    [
        ("import torch.distributed as dist", "torch.distributed"),
        ("from torch import distributed", "torch.distributed"),
        ("def f():\n    from torch.distributed import barrier", "torch.distributed"),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed"),
        ("from .mesh import Mesh", "hyvideo.distributed.mesh"),
        ("from . import mesh", "hyvideo.distributed.mesh"),
        ("from ..trainer import Trainer", "hyvideo.trainer"),
    ],
)
def test_every_form_of_import_is_seen(source, name):
    assert name in imports(source, "hyvideo.distributed")


@pytest.mark.parametrize("file", files_in("grpo", "schedulers"))
def test_mathematics_imports_only_torch_and_itself(file):
    allowed = [*sys.stdlib_module_names, "torch", "hyvideo.grpo", "hyvideo.schedulers"]
    if is_within(name_of(file), "hyvideo.schedulers"):
        allowed.append("diffusers")
    strangers = {name for name in imports_of(file) if not is_within(name, *allowed)}
    assert not strangers
    assert not {name for name in imports_of(file) if is_within(name, "torch.distributed")}


@pytest.mark.parametrize("file", files_in("models", "pipelines"))
def test_models_and_pipelines_do_not_communicate(file):
    assert not {name for name in imports_of(file) if is_within(name, *COMMUNICATION)}


def test_torch_distributed_is_imported_in_one_folder():
    users = {name_of(file) for file in FILES if any(is_within(name, "torch.distributed") for name in imports_of(file))}
    assert users
    assert all(is_within(user, "hyvideo.distributed") for user in users), users


def test_nothing_imports_the_trainer():
    assert not {name_of(file) for file in FILES if any(is_within(name, "hyvideo.trainer") for name in imports_of(file))}
