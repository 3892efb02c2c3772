"""Write configs/settings.schema.json, with which editors complete and check the settings of a run.

    python -m scripts.settings_schema

An editor with a YAML language server uses it for a file whose first line is

    # yaml-language-server: $schema=PATH/configs/settings.schema.json
"""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from hyvideo.data.files import ROOT
from hyvideo.settings.command_line import ENVIRONMENT
from hyvideo.settings.config import LEAVES, OBJECTIVE, SECTIONS
from hyvideo.settings.objectives import BUILT_IN
from hyvideo.settings.reference_flags import IGNORED, RENAMED, SIZES, SWITCHES
from hyvideo.settings.sections import Leaf, Switch

PATH = ROOT / "configs/settings.schema.json"


def main(argv: list[str] | None = None) -> None:
    description = __doc__.splitlines()[0]
    argparse.ArgumentParser(description=description).parse_args(argv)
    PATH.write_text(text(), encoding="utf-8")


def text() -> str:
    """Return the content of the file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def schema() -> dict[str, Any]:
    """Return the JSON schema of a YAML file of settings."""
    classes = [*SECTIONS.values(), *BUILT_IN.values()]
    declared = [cls.model_json_schema()["properties"] for cls in classes]
    properties = {name: schema_of(leaf, declared) for name, leaf in LEAVES.items()}
    properties[ENVIRONMENT] = {
        "type": "object",
        "description": "What a run wrote to its config.yaml besides its settings.",
    }
    properties |= {flag: properties[name] for flag, name in RENAMED.items()}
    properties |= {flag: {} for flag in (*SIZES, *SWITCHES, "video_bucket_hw_base_size", *IGNORED)}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Settings of post_train.py",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def schema_of(leaf: Leaf, declared: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a setting; of one that several objectives have, any of theirs.

    ``declared`` are the properties of each section and objective.
    """
    alternatives = [accepted(leaf)] if leaf.name == OBJECTIVE else []
    for properties in declared:
        if leaf.name in properties:
            values = of_yaml(leaf, properties[leaf.name])
            alternatives += [each for each in values if each not in alternatives]
    found = {"anyOf": alternatives}
    if len(alternatives) == 1:
        found = alternatives[0]
    found = found | {"description": leaf.sentence}
    if leaf.default is not None:
        found["default"] = leaf.default
    return found


def of_yaml(leaf: Leaf, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas of what a file may give for the ``values`` of a setting."""
    traits = ("title", "description", "default", "decides", "is_path", "measured", "choices")
    plain = {name: value for name, value in values.items() if name not in traits}
    # None stands for a line that is not given
    found = [each for each in plain.pop("anyOf", [plain]) if each != {"type": "null"}]
    if leaf.choices:
        return [accepted(leaf)]
    if leaf.kind is Switch:
        found.append({"type": "boolean"})
    if leaf.is_list:
        found.append({"type": "string"})  # a single element
    if leaf.kind is str:
        found.append({"type": "number"})  # such as sigmas: 1
    if leaf.name in ("reward_weights", "reward_config"):
        found.append({"type": "object"})
    return found


def accepted(leaf: Leaf) -> dict[str, Any]:
    """Return the schema of a built-in name or FILE.py:NAME."""
    return {"anyOf": [{"enum": leaf.choices}, {"type": "string", "pattern": r"\.py:"}]}


if __name__ == "__main__":
    main()
