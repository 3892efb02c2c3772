"""YAML files from outside, read as what they say and no more: words, numbers, truth values, lists, mappings.

YAML 1.1 has a second meaning for much: ``010`` is 8, ``1:30`` is 90, ``2026-01-01`` a date, ``*a`` whatever ``&a`` was
(nine lines of that fill any memory), and of a name that comes twice the first is forgotten. Numbers here are decimal,
dates are text, and the rest is refused.
"""

import re
from pathlib import Path

import yaml

from hyvideo.data.outside import file_problem, shown

MAX_BYTES = 2**20
MAX_DEPTH = 16
MAX_NODES = 20_000
_KINDS = ("null", "bool")


class _Loader(yaml.SafeLoader):
    """The safe loader, which makes plain values only, without what is above."""

    yaml_implicit_resolvers: dict = {}

    def __init__(self, text: str):
        super().__init__(text)
        self.depth = self.num_nodes = 0

    def compose_node(self, parent, index):
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refusal(event, f"repeats a value by *{event.anchor[:50]}; write it out")
        if event.tag is not None:
            raise _refusal(event, f"has the tag {shown(event.tag, 80)}; leave it out, values have the type they show")
        self.depth, self.num_nodes = self.depth + 1, self.num_nodes + 1
        if self.depth > MAX_DEPTH:
            raise _refusal(event, f"is nested more than {MAX_DEPTH} deep")
        if self.num_nodes > MAX_NODES:
            raise _refusal(event, f"is the end of the {MAX_NODES:,} values that a file may have")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node, deep=False):
        names = set()
        for key, _ in node.value:
            name = key.value if key.tag == "tag:yaml.org,2002:str" else None
            if name is None:
                raise _refusal(key, "must begin with a name; put a name that is a number or a truth value in quotes")
            if name in names:
                raise _refusal(key, f"gives {shown(name, 80)} a second time; keep one")
            names.add(name)
        return super().construct_mapping(node, deep)


for _first, _resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
    for _tag, _pattern in _resolvers:
        if _tag.rpartition(":")[2] in _KINDS:
            _Loader.add_implicit_resolver(_tag, _pattern, [_first])
# At most 18 digits: what is longer stays text and is no number of a setting.
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]{0,17})$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"([-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)


def read_yaml(path: Path) -> object:
    """What a YAML file holds. Raises ValueError for a file that cannot be read, and for what is not as above."""
    if problem := file_problem(path, MAX_BYTES):
        raise ValueError(f"must name a readable YAML file, got {shown(path)}: {problem}")
    try:
        loader = _Loader(path.read_bytes().decode("utf-8-sig"))
        return loader.get_single_data()
    except OSError as error:
        raise ValueError(f"must name a readable YAML file, got {shown(path)}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{shown(path)} is not valid YAML: {' '.join(str(error).split())[:500]}") from error


def _refusal(place, reason: str) -> yaml.YAMLError:
    return yaml.YAMLError(f"line {place.start_mark.line + 1} {reason}")
