"""Options and weights of the scorers, from the settings of the rewards."""

import json

from hyvideo.data.files import parse_json
from hyvideo.data.text import quote
from hyvideo.data.yaml_files import read_yaml
from hyvideo.settings.config import REWARD_PRESETS, flat_weights, is_json
from hyvideo.settings.reference_flags import REFERENCE_SCORERS
from hyvideo.settings.sections import RewardSettings


def given_reward_weights(reward: RewardSettings) -> dict[str, float | dict[str, float]]:
    """Return the weights by dimension, or by scorer and dimension. Raises ValueError for invalid
    JSON.
    """
    text = reward.reward_weights
    return REWARD_PRESETS[text] if text in REWARD_PRESETS else parse_json(text)


def reward_weights(reward: RewardSettings) -> dict[str, float]:
    """Return the weights by dimension, for plans and reports; see `flat_weights`."""
    return flat_weights(given_reward_weights(reward))


def given_pair_weights(text: str) -> dict[str, float]:
    """Return the weights of the dimensions of rated pairs; empty if all dimensions count equally.

    Raises ValueError for invalid JSON.
    """
    try:
        return parse_json(text) if text else {}
    except ValueError as error:
        raise ValueError(f"pair_weights is not valid JSON: {error}") from error


def reward_options(reward: RewardSettings) -> dict[str, dict]:
    """Return the options of each scorer; ``reward_config`` overrides settings.

    Raises ValueError if it is invalid.
    """
    named = [*reward.reward_model, *reward.held_out_reward_model]
    options: dict[str, dict] = {name: {} for name in named}
    if "videoalign" in options:
        options["videoalign"] = {"precision": reward.reward_precision}
    path = reward.reward_config
    if not path:
        return options
    try:
        content = parse_json(path) if is_json(path) else read_yaml(path)
    except ValueError as error:
        got = f", got {path}" if is_json(path) else ""
        raise ValueError(f"reward_config {error}{got}") from error
    for key, given in (content if isinstance(content, dict) else {"": None}).items():
        name = REFERENCE_SCORERS.get(key, key)
        if name not in options or not isinstance(given, dict):
            raise ValueError(
                f"reward_config {path} must map {', '.join(options)} to a mapping of options, got "
                f"{quote(key)}"
            )
        reserved = sorted(given.keys() & {"name", "root", "device"})
        if reserved:
            raise ValueError(
                f"reward_config {path} must not set {', '.join(reserved)} of {name}; remove it"
            )
        options[name] = options[name] | given
    return options


def options_of_scorer(name: str, config: str) -> dict:
    """Return the options of a scorer in a ``reward_config``, or in JSON without its name."""
    if is_json(config) and f"{json.dumps(name)}:" not in config.replace('" :', '":'):
        config = f"{{{json.dumps(name)}: {config}}}"
    return reward_options(RewardSettings(reward_model=[name], reward_config=config))[name]
