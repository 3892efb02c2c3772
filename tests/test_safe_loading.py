"""Static check that no content of a file or flag is executed: no unpickling, no eval, no shell."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    [
        *(ROOT / "hyvideo").rglob("*.py"),
        *(ROOT / "scripts").rglob("*.py"),
        *(ROOT / "studies").rglob("*.py"),
        ROOT / "generate.py",
        ROOT / "post_train.py",
    ],
)

# file -> calls that are safe there, with the reason.
ALLOWED = {
    # Accepts only names that describe tensors; tests/checkpoints/test_checkpoint.py tests others.
    "hyvideo/checkpoints/reader.py": {"pickle.Unpickler"},
    # A restricted version of the safe loader.
    "hyvideo/files/yaml_files.py": {"yaml.SafeLoader"},
    # Runs a program of this project, as the installed command names them.
    "hyvideo/commands.py": {"runpy.run_module"},
    # Runs a program of this project, as the rehearsal names it.
    "hyvideo/rehearsal/stand_ins.py": {"runpy.run_path", "runpy.run_module"},
}
_BUILTINS = ("eval", "exec", "__import__")
_MODULES = {
    "pickle": ("load", "loads", "Unpickler"),
    "marshal": ("load", "loads"),
    "shelve": ("open",),
    "joblib": ("load",),
    "cloudpickle": ("load", "loads"),
    "dill": ("load", "loads"),
    "runpy": ("run_path", "run_module"),
    "os": ("system", "popen"),
    "yaml": (
        *("load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all"),
        *("Loader", "FullLoader", "UnsafeLoader", "SafeLoader", "CLoader", "CSafeLoader"),
    ),
}


def unsafe(source: str) -> set[str]:
    """Return the names used in a source file that can execute their input."""
    tree = ast.parse(source)
    names = _imported_names(tree)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = _full_name(node, names)
            module, _, last = name.rpartition(".")
            if name in _BUILTINS or last in _MODULES.get(module, ()):
                found.add(name)
        if isinstance(node, ast.Call):
            found |= _unsafe_call(node, _full_name(node.func, names))
    return found


def _unsafe_call(call: ast.Call, name: str) -> set[str]:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    is_true = {
        arg
        for arg, value in keywords.items()
        if isinstance(value, ast.Constant) and value.value is True
    }
    found = set()
    if name == "torch.load" and "weights_only" not in is_true:
        found.add("torch.load without weights_only=True")
    if name in ("numpy.load", "np.load") and "allow_pickle" in keywords:
        found.add("numpy.load with allow_pickle")
    shell = keywords.get("shell")
    if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
        found.add("shell")
    trusted = keywords.get("trust_remote_code")
    if trusted is not None and not (isinstance(trusted, ast.Constant) and trusted.value is False):
        found.add("trust_remote_code")
    return found


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the full name of each imported name."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return names


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def test_no_file_runs_what_it_reads():
    found = {}
    for file in FILES:
        name = file.relative_to(ROOT).as_posix()
        if left := unsafe(file.read_text(encoding="utf-8")) - ALLOWED.get(name, set()):
            found[name] = sorted(left)
    assert len(FILES) > 100 and not found
