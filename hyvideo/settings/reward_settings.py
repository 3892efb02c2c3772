"""Options and weights of the scorers, from the settings of the rewards, and their rules."""

import json
from collections import Counter

from pydantic import TypeAdapter

from hyvideo.files.text import nearest, quote
from hyvideo.files.yaml_files import read_yaml
from hyvideo.rewards.rewards import (
    DIMENSIONS,
    SCORERS,
    known_dimensions,
    scorer_class,
    short_names,
)
from hyvideo.settings.problems import Problems, problem_of
from hyvideo.settings.reference_flags import REFERENCE_SCORERS
from hyvideo.settings.reward_entries import weights_by_dimension
from hyvideo.settings.sections import RewardSettings

# Settings A and B of the paper (arXiv:2603.21872, Table 2).
REWARD_PRESETS = {
    "averaged": {"VQ": 1.0, "MQ": 1.0, "TA": 1.0},
    "alignment": {"VQ": 0.5, "MQ": 0.5, "TA": 1.0},
}
REWARD_PRESETS["A"] = REWARD_PRESETS["averaged"]
REWARD_PRESETS["B"] = REWARD_PRESETS["alignment"]
_WEIGHTS = TypeAdapter(dict[str, float | dict[str, float]])


def is_json(text: str) -> bool:
    """Return whether ``reward_weights`` or ``reward_config`` is a JSON object instead of a name or
    path.
    """
    return text.lstrip().startswith("{")


def resolved_weights(reward: RewardSettings) -> str:
    """Return reward_weights with weights of dimensions: a number for a scorer is one for each of
    its dimensions. If a preset names no dimension of custom scorers, each that they declare has
    weight 1.

    Raises ValueError if a scorer cannot be imported, or if its dimensions are not known yet.
    """
    if reward.reward_weights not in REWARD_PRESETS:
        given = given_reward_weights(reward)
        if not given.keys() & set(reward.reward_model):
            return reward.reward_weights
        options = reward_options(reward)
        found = weights_by_dimension(given, {name: options[name] for name in reward.reward_model})
        return reward.reward_weights if found == given else json.dumps(found)
    weights = {}
    for name in reward.reward_model:
        dimensions = known_dimensions(name, {}) if ":" in name else None
        if dimensions is None or set(dimensions) & set(DIMENSIONS):
            return reward.reward_weights
        weights[name] = dict.fromkeys(dimensions, 1)
    if len(weights) == 1:
        (weights,) = weights.values()
    return json.dumps(weights)


def given_reward_weights(reward: RewardSettings) -> dict[str, float | dict[str, float]]:
    """Return the weights by dimension, or by scorer and dimension. Raises ValueError for others."""
    text = reward.reward_weights
    if text in REWARD_PRESETS:
        weights = REWARD_PRESETS[text]
    else:
        try:
            weights = _WEIGHTS.validate_json(text)
        except ValueError as error:
            raise ValueError(
                f"reward_weights must be {', '.join(REWARD_PRESETS)} or a JSON object, such as "
                """'{"VQ": 1, "MQ": 0.5}', with a number for each dimension, got """
                f"{quote(text)}"
            ) from error
    return {REFERENCE_SCORERS.get(name, name): weight for name, weight in weights.items()}


def reward_weights(reward: RewardSettings) -> dict[str, float]:
    """Return the weights by dimension, for plans and reports; see `flat_weights`."""
    return flat_weights(given_reward_weights(reward))


def reward_options(reward: RewardSettings) -> dict[str, dict]:
    """Return the options of each scorer, from ``reward_config``.

    Raises ValueError if it is invalid.
    """
    named = reward.scorers
    options: dict[str, dict] = {name: {} for name in named}
    path = reward.reward_config
    if not path:
        return options
    try:
        content = json.loads(path) if is_json(path) else read_yaml(path)
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
        options[name] = options[name] | given
    return options


def compared_options(reward: RewardSettings) -> dict[str, dict]:
    """Return the options of each scorer that must be the same when a run is resumed."""
    return {
        name: {
            key: value
            for key, value in options.items()
            if key not in getattr(scorer_class(name), "free_options", ())
        }
        for name, options in reward_options(reward).items()
    }


def options_of_scorer(name: str, config: str) -> dict:
    """Return the options of a scorer in a ``reward_config``, or in JSON without its name."""
    if is_json(config) and f"{json.dumps(name)}:" not in config.replace('" :', '":'):
        config = f"{{{json.dumps(name)}: {config}}}"
    return reward_options(RewardSettings(reward_model=[name], reward_config=config))[name]


def flat_weights(weights: dict) -> dict:
    """Return weights by dimension; scorers are flattened:
    ``{"videoalign": {"VQ": 0.5}, "CLIPScore": 1}``.

    A dimension that two scorers have is named SCORER/DIMENSION.
    """
    by_scorer = [
        value if isinstance(value, dict) else {name: value} for name, value in weights.items()
    ]
    counts = Counter(dimension for dimensions in by_scorer for dimension in dimensions)
    short = short_names([name for name, value in weights.items() if isinstance(value, dict)])
    found = {}
    for scorer, dimensions in zip(weights, by_scorer):
        for dimension, weight in dimensions.items():
            is_shared = counts[dimension] > 1 and scorer in short
            found[f"{short[scorer]}/{dimension}" if is_shared else dimension] = weight
    return found


def reward_problems(reward: RewardSettings) -> Problems:
    """Yield unknown scorers and invalid options or weights."""
    if not reward.reward_model:
        yield f"reward_model must name one of {', '.join(SCORERS)} or FILE.py:CLASS, got none"
    for setting in ("reward_model", "held_out_reward_model"):
        for name in getattr(reward, setting):
            if name in SCORERS or ":" in name:
                continue
            hint = nearest(name, SCORERS) or "correct the name"
            if name.endswith(".py"):
                hint = f"add the name of the class or function: {name}:NAME"
            yield (
                f"{setting} must be one of {', '.join(SCORERS)} or FILE.py:CLASS, got "
                f"{quote(name)}; {hint}"
            )
    named = reward.scorers
    if len(set(named)) < len(named):
        yield (
            "reward_model and held_out_reward_model must name each scorer once, because a scorer "
            "that rewards is not held out, and a second copy would count twice, got "
            f"{', '.join(named)}; remove the repeated one"
        )
    for name in reward.scorers:
        if ":" in name:
            yield from problem_of(scorer_class, name)
    yield from problem_of(reward_options, reward)
    if reward.reward_weights not in REWARD_PRESETS:
        yield from problem_of(resolved_weights, reward)


def weighted_dimensions_exist(reward: RewardSettings) -> Problems:
    """Yield weights of dimensions that no scorer has, as far as these are known before the scorers
    are loaded.
    """
    known: dict[str, tuple[str, ...]] = {}  # dimensions by scorer
    options = reward_options(reward)
    for name in reward.reward_model:
        try:
            dimensions = known_dimensions(name, options[name])
        except ValueError:  # reported above
            return
        if dimensions is None:
            return
        known[name] = dimensions
    every = {dimension for dimensions in known.values() for dimension in dimensions}
    labels = short_names(list(known))
    named = every | {f"{labels[name]}/{each}" for name in known for each in known[name]}
    absent = []
    for name, value in given_reward_weights(reward).items():
        weights = value if isinstance(value, dict) else {name: value}
        possible = known.get(name, ()) if isinstance(value, dict) else named
        absent += [each for each, weight in weights.items() if weight and each not in possible]
    if absent and known:
        example = json.dumps(dict.fromkeys(sorted(every), 1))
        hint = nearest(absent[0], every) or f"for example, set reward_weights {quote(example)}"
        yield (
            f"reward_weights must name dimensions of reward_model {', '.join(known)}, which are "
            f"{', '.join(sorted(every))}, got {', '.join(absent)}; {hint}"
        )
