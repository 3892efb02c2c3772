"""Reading of YAML files that users write."""

import re
from pathlib import Path

import yaml

from hyvideo.data.files import file_problem
from hyvideo.data.text import quote

MAX_BYTES = 2**20  # largest YAML file


class _Loader(yaml.SafeLoader):
    """Safe loader with decimal numbers, including ``1e-5``, and dates as text; rejects duplicate
    names and aliases.
    """

    yaml_implicit_resolvers: dict = {}

    def compose_node(self, parent, index):
        # aliases of aliases make a short file expand without bound
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(
                f"line {event.start_mark.line + 1}: replace the alias *{event.anchor} by its value"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in names[:number]:
                raise yaml.YAMLError(
                    f"line {key.start_mark.line + 1} repeats {quote(key.value, 80)}"
                )
        return super().construct_mapping(node, deep)


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
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_pattern})$"), _first)
# Errors of the loader for invalid YAML, a tag that does not fit its value, and too deep nesting.
_YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


def read_yaml(path: str | Path) -> object:
    """Return the content of a YAML file.

    Raises ValueError for an unreadable file or invalid YAML.
    """
    if problem := file_problem(path, MAX_BYTES):
        raise ValueError(f"{quote(path)} must be a readable YAML file: {problem}")
    try:
        return _Loader(Path(path).read_text(encoding="utf-8-sig")).get_single_data()
    except OSError as error:
        raise ValueError(f"{quote(path)} must be a readable YAML file: {error.strerror}") from error
    except _YAML_ERRORS as error:
        raise ValueError(
            f"{quote(path)} is not valid YAML: {' '.join(str(error).split())[:500]}"
        ) from error
