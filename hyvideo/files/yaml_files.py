"""The reader of YAML files that users write: numbers as people write them, no repeated names, and
nothing that runs code.
"""

import re
from pathlib import Path

import yaml

from hyvideo.files.files import read_text
from hyvideo.files.text import quote


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

    Raises ValueError, naming the file, if it is missing or invalid.
    """
    text = read_text(path)
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())[:500]
        mark = getattr(error, "problem_mark", None)
        if mark is not None:
            reason = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
        raise ValueError(f"{quote(path)} is not valid YAML: {reason}") from error
