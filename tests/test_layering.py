"""Import rules between the packages and names of model families, checked from the source."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "hyvideo").rglob("*.py"))
PROGRAM_FILES = [ROOT / "generate.py", ROOT / "post_train.py"]  # other files here are the user's
STUDIES = sorted((ROOT / "studies").rglob("*.py"))  # what no run needs
# the product
SOURCES = sorted([*FILES, *STUDIES, *(ROOT / "scripts").rglob("*.py"), *PROGRAM_FILES])
# The packages of hyvideo/, from the lowest layer up. A package may import itself and lower layers
# only.
LAYERS = (
    ("files", "loss"),
    ("data", "schedulers", "weights"),
    ("models",),
    ("distributed", "pipelines", "rewards"),
    ("checkpoints", "miniature", "records"),
    ("settings",),
    ("checks",),
    ("planning", "rehearsal"),
    ("loading",),
    ("training",),
    ("validation",),
    ("report",),
    ("generation", "ratings"),
    ("trainer",),
    ("commands",),
)
LAYER_OF = {package: number for number, layer in enumerate(LAYERS) for package in layer}
COMMUNICATION = ("torch.distributed", "hyvideo.distributed.mesh", "hyvideo.distributed.collectives")


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def imports(source: str, package: str = "hyvideo") -> set[str]:
    """Return the full names that a source imports: ``a.b`` and ``a.b.c`` for
    ``from a.b import c``.
    """
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
        elif isinstance(node, ast.Attribute) and node.attr == "distributed":
            if ast.unparse(node) == "torch.distributed":
                found.add("torch.distributed")
    return found


@functools.cache
def imports_of(file: Path) -> set[str]:
    return imports(file.read_text(encoding="utf-8"), ".".join(file.parent.relative_to(ROOT).parts))


def is_within(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def files_in(*folders: str) -> list:
    files = [
        file
        for file in FILES
        if is_within(name_of(file), *(f"hyvideo.{folder}" for folder in folders))
    ]
    assert files
    return [pytest.param(file, id=name_of(file)) for file in files]


@pytest.mark.parametrize("file", files_in("loss", "schedulers"))
def test_loss_and_schedulers_import_only_torch_and_themselves(file):
    allowed = [*sys.stdlib_module_names, "torch", "hyvideo.loss", "hyvideo.schedulers"]
    if is_within(name_of(file), "hyvideo.schedulers"):
        allowed += ["diffusers", "hyvideo.files.custom_code"]  # a custom sampler is loaded
    forbidden = {name for name in imports_of(file) if not is_within(name, *allowed)}
    assert not forbidden
    assert not {name for name in imports_of(file) if is_within(name, "torch.distributed")}


@pytest.mark.parametrize("file", files_in("models", "pipelines"))
def test_models_and_pipelines_do_not_communicate(file):
    assert not {name for name in imports_of(file) if is_within(name, *COMMUNICATION)}


def test_torch_distributed_is_imported_for_ranks_and_for_the_tensors_of_checkpoints_only():
    users = {
        name_of(file)
        for file in FILES
        if any(is_within(name, "torch.distributed") for name in imports_of(file))
    }
    tensors = [f"hyvideo.checkpoints.{name}" for name in ("loading", "reader", "writer")]
    assert users > set(tensors)
    assert all(is_within(user, "hyvideo.distributed", *tensors) for user in users), users


def test_nothing_imports_the_trainer():
    assert not {
        name_of(file)
        for file in FILES
        if any(is_within(name, "hyvideo.trainer") for name in imports_of(file))
    }


# --- layers ---------------------------------------------------------------------------------------


def package_of(name: str) -> str | None:
    """Return the package of a module: ``config`` for ``hyvideo.settings.config``."""
    parts = name.split(".")
    return parts[1] if parts[0] == "hyvideo" and len(parts) > 1 else None


def forbidden_imports() -> set[tuple[str, str]]:
    """Return the imports of packages that are not in a lower layer, with the importing file."""
    found = set()
    for file in FILES:
        name = name_of(file)
        if name == "hyvideo.__init__":
            continue
        for imported in map(package_of, imports_of(file)):
            if (
                imported
                and imported != package_of(name)
                and LAYER_OF[imported] >= LAYER_OF[package_of(name)]
            ):
                found.add((name, imported))
    return found


def test_every_package_has_a_layer():
    packages = {
        path.stem
        for path in (ROOT / "hyvideo").iterdir()
        if path.name not in ("__init__.py", "__pycache__")
    }
    assert packages == set(LAYER_OF)


def test_no_run_needs_the_studies():
    assert STUDIES
    assert not {
        name_of(file)
        for file in FILES
        if any(is_within(name, "studies") for name in imports_of(file))
    }


def test_packages_import_only_lower_layers():
    assert not forbidden_imports()


@functools.cache
def imports_of_modules() -> dict[str, set[str]]:
    """Return the module-level imports by module of hyvideo; imports inside functions do
    not count.
    """
    modules = {name_of(file).removesuffix(".__init__"): file for file in FILES}
    graph = {}
    for name, file in modules.items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        graph[name] = imports(ast.unparse(tree), name_of(file.parent)) - {name}
    return graph


def test_there_are_no_circular_imports():
    graph = imports_of_modules()
    while leaves := {name for name, imported in graph.items() if not imported & graph.keys()}:
        graph = {name: imported for name, imported in graph.items() if name not in leaves}
    assert not graph


def test_importing_the_loader_imports_neither_diffusers_nor_transformers():
    graph = imports_of_modules()
    found, pending = set(), {"hyvideo.models.loading"}
    while pending:
        found |= pending
        pending = set().union(*(graph.get(name, set()) for name in pending)) - found
    assert "torch" in found and "hyvideo.weights.weight_files" in found
    assert not [
        name for name in found if is_within(name, "diffusers", "transformers", "peft", "accelerate")
    ]


# --- families of models ---------------------------------------------------------------------------

MODELS = ROOT / "hyvideo" / "models"
FAMILIES = sorted(file.parent for file in MODELS.glob("*/family.py"))


def test_the_product_does_not_import_the_examples():
    assert not {
        file.name
        for file in SOURCES
        if any(is_within(name, "examples") for name in imports_of(file))
    }


def test_an_audit_shares_no_code_with_what_it_audits():
    found = {
        f"{name_of(file)}: {name}"
        for file in (ROOT / "scripts/audit").rglob("*.py")
        for name in imports_of(file)
        if is_within(name, "hyvideo", "studies", "examples")
    }
    assert not found


def test_families_do_not_import_one_another():
    names = [name_of(family) for family in FAMILIES]
    assert "hyvideo.models.hunyuan_video15" in names
    for file in FILES:
        if family := [name for name in names if is_within(name_of(file), name)]:
            others = [name for name in names if name not in family]
            assert not {name for name in imports_of(file) if is_within(name, *others)}, name_of(
                file
            )


# --- pages ----------------------------------------------------------------------------------------


def test_the_files_on_the_architecture_page_exist():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page[
        page.index("## Where each stage is implemented") : page.index("## Add your own parts")
    ]
    rows = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")]
    named = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert len(named) > 20
    assert not [path for path in named if not (ROOT / "hyvideo" / path).exists()]
