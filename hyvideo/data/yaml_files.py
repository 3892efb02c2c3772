"""The reader of YAML files that users write: numbers as people write them, no repeated names, and
nothing that runs code.
"""

import re
from pathlib import Path

import yaml

from hyvideo.data.files import read_text
from hyvideo.data.text import quote

MAX_YAML_BYTES = 2**20
# of a file whose aliases are replaced by what they stand for: aliases of aliases make a short file
# expand without bound
MAX_VALUES = 100_000

# errors of the loader for invalid YAML, a tag that does not fit its value, and too deep nesting
_INVALID = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


class _Loader(yaml.SafeLoader):
    """Safe loader with decimal numbers, including ``1e-5``, and dates as text; rejects repeated
    names.
    """

    yaml_implicit_resolvers: dict = {}

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if str(key.value) in names:
                raise yaml.YAMLError(
                    f"line {key.start_mark.line + 1} repeats {quote(key.value, 80)}"
                )
            names.add(str(key.value))
        return node

    def get_single_node(self):
        node = super().get_single_node()
        if node is not None and _expanded_size(node, {}) > MAX_VALUES:
            raise yaml.YAMLError(
                f"it has more than {MAX_VALUES:,} values when its aliases are replaced"
            )
        return node


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values of a node without aliases; ``sizes`` are those of other nodes.

    Raises YAMLError for a node that contains itself.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    known = sizes.get(id(node))
    if known is not None:
        if known == 0:  # its size is being computed
            raise yaml.YAMLError(f"line {node.start_mark.line + 1} has an alias of itself")
        return known
    sizes[id(node)] = 0
    children = node.value
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    size = 1 + sum(_expanded_size(child, sizes) for child in children)
    sizes[id(node)] = size
    return size


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"(?i:true|false|yes|no|on|off)", list("tTfFyYnNoO")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?",
        list("-+.0123456789"),
    ),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_pattern})$"), _first)


def read_yaml(path: str | Path) -> object:
    """Return the content of a YAML file.

    Raises ValueError, naming the file, if it is missing, too large or invalid.
    """
    try:
        text = read_text(path, MAX_YAML_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"file not found: {path}") from error
    except (IsADirectoryError, PermissionError) as error:
        raise ValueError(f"{quote(path)} must be a readable YAML file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{quote(path)} must be UTF-8 text: {error}") from error
    try:
        return _Loader(text).get_single_data()
    except _INVALID as error:
        reason = " ".join(str(error).split())[:500]
        mark = getattr(error, "problem_mark", None)
        if mark is not None:
            reason = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
        raise ValueError(f"{quote(path)} is not valid YAML: {reason}") from error
