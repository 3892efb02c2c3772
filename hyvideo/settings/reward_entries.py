"""Entries of reward_model: a scorer with its weight and its options in one place.

    reward_model:
      - name: videoalign
        weight: {VQ: 0.5, MQ: 0.5, TA: 1}
      - name: remote
        weight: {aesthetics: 0.2}
        options: {url: "http://gpu12:8000"}

They are a form of three settings: the names of the entries are reward_model, their weights
reward_weights, and their options reward_config.
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from hyvideo.files.text import quote
from hyvideo.rewards.rewards import known_dimensions, scorer_class


class RewardEntry(BaseModel):
    """A scorer of a run."""

    model_config = ConfigDict(extra="forbid")

    name: str
    # a number is the weight of each dimension; None: the weights are in reward_weights
    weight: float | dict[str, float] | None = None
    options: dict[str, Any] = {}


def without_entries(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose entries of reward_model and held_out_reward_model are names; their
    weights and options are in reward_weights and reward_config.

    Raises ValueError for an invalid entry, and for weights or options in two places.
    """
    found = dict(values)
    weights: dict[str, float | dict[str, float]] = {}
    options: dict[str, dict] = {}
    unweighted = []
    for setting in ("reward_model", "held_out_reward_model"):
        given = values.get(setting, [])
        given = given if isinstance(given, list) else [given]
        if not any(map(is_entry, given)):
            continue
        entries = [read_entry(setting, each) for each in given]
        found[setting] = [entry.name for entry in entries]
        options |= {entry.name: entry.options for entry in entries if entry.options}
        if setting == "reward_model":
            weights = {each.name: each.weight for each in entries if each.weight is not None}
            unweighted = [each.name for each in entries if each.weight is None]
        elif any(entry.weight is not None for entry in entries):
            raise ValueError(f"{setting} only measures and has no weights; remove weight")
    if weights:
        if unweighted:
            raise ValueError(
                "reward_model must give each scorer a weight, or none, and then reward_weights "
                f"has them; got none for {', '.join(unweighted)}"
            )
        if values.get("reward_weights", "alignment") != "alignment":
            raise ValueError(
                "the weights must be in reward_model or in reward_weights, got both; remove one, "
                f"or set reward_weights {quote(json.dumps(weights), 200)}"
            )
        found["reward_weights"] = json.dumps(weights)
    if options:
        found["reward_config"] = json.dumps(_config_of(values.get("reward_config")) | options)
    return found


def is_entry(given: object) -> bool:
    """Return whether an element of reward_model is an entry instead of a name."""
    return isinstance(given, dict) or (isinstance(given, str) and given.lstrip().startswith("{"))


def read_entry(setting: str, given: object) -> RewardEntry:
    """Return the entry that a mapping, the JSON of a flag, or a name stands for."""
    try:
        if isinstance(given, dict):
            return RewardEntry.model_validate(given)
        if is_entry(given):
            return RewardEntry.model_validate_json(given)
        return RewardEntry(name=given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"an entry of {setting} must have a name and may have weight and options, such as "
            '{"name": "clip", "weight": {"CLIPScore": 0.2}}, got '
            f"{quote(given, 200)}: {place} {first['msg']}"
        ) from error


def _config_of(given: object) -> dict[str, Any]:
    """Return the options in reward_config. Raises ValueError for a file."""
    if not given:
        return {}
    try:
        content = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(
            "options must be in the entries of reward_model or in the file of reward_config, got "
            f"both; move those of {quote(given)} into the entries"
        )
    return content


def weights_by_dimension(
    weights: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return weights in which a number for a scorer is one for each of its dimensions.

    ``options`` are by scorer. Raises ValueError if the dimensions are known only from the answers.
    """
    found = dict(weights)
    for name in weights.keys() & options.keys():
        if isinstance(weights[name], dict):
            continue
        dimensions = known_dimensions(name, options[name])
        if dimensions is None and ":" in name and not isinstance(scorer_class(name), type):
            dimensions = (name.rpartition(":")[2],)  # of a function that returns numbers
        if dimensions is None:
            raise ValueError(
                f'the weight of {name} must be by dimension, such as {{"VQ": {weights[name]:g}}}, '
                "because only its answers say which dimensions it has"
            )
        found[name] = dict.fromkeys(dimensions, weights[name])
    return found
