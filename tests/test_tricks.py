"""Tricks that shorten code and cost its readers time, found in the source: see `KINDS`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    [
        *(ROOT / "hyvideo").rglob("*.py"),
        *(ROOT / "studies").rglob("*.py"),
        *(ROOT / "scripts").rglob("*.py"),
    ]
)
FILES += [ROOT / "generate.py", ROOT / "post_train.py"]  # other files here are the user's
KINDS = {
    "arithmetic with a bool": "write an if",
    "a loop over `values if condition else ()`": "put the loop into an if",
    "an expression as a statement": "write an if",
    "`[*values]`": "write list(values), set(values) or tuple(values)",
    "a packed assignment": "assign three or more values one per line, or unpack a sequence",
    "a dictionary joined to shorten a call": "write the keyword arguments in the call",
    "a local dictionary or tuple as arguments": "write the arguments in the call",
    "several walruses in one expression": "assign the values before",
}
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)


def tricks_in(source: str) -> list[tuple[int, str]]:
    """Return line and kind of each trick in a source, in order."""
    found = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for kind, is_trick in (
            ("arithmetic with a bool", has_bool_arithmetic),
            ("a loop over `values if condition else ()`", is_loop_over_conditional),
            ("an expression as a statement", is_conditional_statement),
            ("`[*values]`", is_starred_copy),
            ("a packed assignment", is_packed_assignment),
            ("a dictionary joined to shorten a call", is_joined_dictionary),
            ("several walruses in one expression", has_several_walruses),
        ):
            if is_trick(node):
                found.append((line_of(node), kind))
    for line in local_arguments(tree):
        found.append((line, "a local dictionary or tuple as arguments"))
    return sorted(set(found))


def line_of(node: ast.AST) -> int:
    return node.iter.lineno if isinstance(node, ast.comprehension) else node.lineno


def is_bool(node: ast.AST) -> bool:
    """Return whether an expression is a bool by its form or by the beginning of its name."""
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "bool"
    name = (
        node.id
        if isinstance(node, ast.Name)
        else node.attr
        if isinstance(node, ast.Attribute)
        else ""
    )
    return name.startswith(("is_", "has_", "needs_", "are_"))


def has_bool_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC):
        return is_bool(node.left) or is_bool(node.right)
    return (
        isinstance(node, ast.AugAssign) and isinstance(node.op, ARITHMETIC) and is_bool(node.value)
    )


def is_loop_over_conditional(node: ast.AST) -> bool:
    if not isinstance(node, (ast.For, ast.comprehension)) or not isinstance(node.iter, ast.IfExp):
        return False
    branches = (node.iter.body, node.iter.orelse)
    return any(isinstance(branch, (ast.Tuple, ast.List)) and not branch.elts for branch in branches)


def is_conditional_statement(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, (ast.IfExp, ast.BoolOp))


def is_starred_copy(node: ast.AST) -> bool:
    """Return whether a list, set or tuple is a copy of one iterable."""
    if not isinstance(node, (ast.List, ast.Set, ast.Tuple)):
        return False
    is_target = isinstance(node, (ast.List, ast.Tuple)) and isinstance(node.ctx, ast.Store)
    return not is_target and len(node.elts) == 1 and isinstance(node.elts[0], ast.Starred)


def is_packed_assignment(node: ast.AST) -> bool:
    """Return whether three or more values are written out and assigned in one statement."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    is_unpacked = any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets)
    return is_unpacked and len(node.value.elts) > 2


def is_joined_dictionary(node: ast.AST) -> bool:
    """Return whether a dictionary of keyword arguments is joined with another: ``f(**a | {...})``,
    ``a |= {...}``.
    """
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.BitOr) and is_dictionary(node.value)
    if not isinstance(node, ast.Call):
        return False
    return any(keyword.arg is None and is_dictionary(keyword.value) for keyword in node.keywords)


def is_dictionary(node: ast.AST) -> bool:
    """Return whether an expression is a dictionary with written-out names, or a union with one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return is_dictionary(node.left) or is_dictionary(node.right)
    if isinstance(node, ast.IfExp):
        return is_dictionary(node.body) or is_dictionary(node.orelse)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "dict" and bool(node.keywords)
    return isinstance(node, ast.Dict) and any(isinstance(key, ast.Constant) for key in node.keys)


def has_several_walruses(node: ast.AST) -> bool:
    """Return whether an expression of a statement has several walruses; those of nested statements
    do not count.
    """
    if not isinstance(node, ast.stmt):
        return False
    expressions = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return any(
        sum(isinstance(part, ast.NamedExpr) for part in ast.walk(child)) > 1
        for child in expressions
    )


def local_arguments(tree: ast.AST) -> list[int]:
    """Return the lines of calls whose arguments are a dictionary or tuple that the same function
    has written out.

    Dictionaries and tuples that are also used otherwise are data.
    """
    lines = []
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        nodes = list(ast.walk(function))
        written = {
            node.targets[0].id
            for node in nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and (isinstance(node.value, ast.Tuple) or is_dictionary(node.value))
        }
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        passed = [(value, call.lineno) for call in calls for value in unpacked_arguments(call)]
        # ``options["a"] = 1`` adds an argument.
        extended = [
            node.value
            for node in nodes
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        ]
        as_arguments = {id(value) for value, _ in passed} | {id(value) for value in extended}
        as_data = {
            node.id
            for node in nodes
            if isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and id(node) not in as_arguments
        }
        lines += [line for value, line in passed if value.id in written - as_data]
    return lines


def unpacked_arguments(call: ast.Call) -> list[ast.Name]:
    """Return the names that a call unpacks: ``a`` and ``b`` of ``f(*a, **b)``."""
    values = [keyword.value for keyword in call.keywords if keyword.arg is None]
    values += [argument.value for argument in call.args if isinstance(argument, ast.Starred)]
    return [value for value in values if isinstance(value, ast.Name)]


@pytest.mark.parametrize(
    "source, kind",
    [
        ("count -= not done", "arithmetic with a bool"),
        ("text = name + '/' * has_folders", "arithmetic with a bool"),
        ("text = ' --tiny' * options.is_tiny", "arithmetic with a bool"),
        ("forwards = 1 + (kind != 'none')", "arithmetic with a bool"),
        ("problems = ['wrong'] * (found != needed)", "arithmetic with a bool"),
        (
            "for row in rows if column == 0 else ():\n    pass",
            "a loop over `values if condition else ()`",
        ),
        (
            "[row for row in (rows if column == 0 else ())]",
            "a loop over `values if condition else ()`",
        ),
        ("setattr(a, b, c) if b in d else delattr(a, b)", "an expression as a statement"),
        ("done or stop()", "an expression as a statement"),
        ("names = [*values]", "`[*values]`"),
        ("names = {*values}", "`[*values]`"),
        ("names = (*values,)", "`[*values]`"),
        ("self.a, self.b, self.c = a, b, c", "a packed assignment"),
        ("f(**options | {'a': 1})", "a dictionary joined to shorten a call"),
        ("f(**({} if x else {'a': 1}))", "a dictionary joined to shorten a call"),
        ("options |= {'a': 1}", "a dictionary joined to shorten a call"),
        (
            "def f():\n    sizes = {'a': 1}\n    g(**sizes)",
            "a local dictionary or tuple as arguments",
        ),
        (
            "def f():\n    sizes = common | {'a': 1}\n    g(**sizes)",
            "a local dictionary or tuple as arguments",
        ),
        (
            "def f():\n    a = {'b': 1}\n    a['c'] = 2\n    g(**a)",
            "a local dictionary or tuple as arguments",
        ),
        ("def f():\n    parts = a, b\n    g(*parts)", "a local dictionary or tuple as arguments"),
        ("if (a := b) and (c := d):\n    pass", "several walruses in one expression"),
    ],
)
def test_a_trick_is_found(source, kind):
    assert kind in KINDS
    assert {found for _, found in tricks_in(source)} == {kind}


@pytest.mark.parametrize(
    "source",
    [
        "count -= 1 if done else 0",
        "number = sum(value > 0 for value in values)",
        "mask = is_wrong & (values > 0)",
        "for row in [row for row in rows if row]:\n    pass",
        "names = [*first, *second]",
        "names = [*first, 1]",
        "first, *rest = values",
        "height, width = video.shape[-2:]",
        "height, width, frames = size_of(video)",
        "low, high = middle, high",
        "for (*a,) in values:\n    pass",
        "for text in values if is_list else [values]:\n    pass",
        "total = settings | given",
        "seen |= {name}",
        "f(**settings)",
        "f(**{name: text})",
        "def f():\n    changes = {'a': 1}\n    g(**changes)\n    return changes",
        "def f(**settings):\n    g(**settings)",
        "def f():\n    settings = read()\n    g(**settings)",
        "if (a := b):\n    pass",
        "stop()",
    ],
)
def test_plain_statements_are_no_tricks(source):
    assert tricks_in(source) == []


def reports(path: str) -> list[str]:
    """Return a line per trick in a file, with what to write."""
    found = tricks_in((ROOT / path).read_text(encoding="utf-8"))
    return [f"{path}:{line}: {kind}; {KINDS[kind]}" for line, kind in found]


def test_the_product_has_no_tricks():
    paths = [file.relative_to(ROOT).as_posix() for file in FILES]
    found = [report for path in paths for report in reports(path)]
    assert not found, "\n".join(found)
