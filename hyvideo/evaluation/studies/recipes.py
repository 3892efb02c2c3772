"""Recipes of a YAML file, each with as many iterations as a budget pays for.

    base: configs/miniature.yaml            the settings that all start from
    common: {validation_interval: 5}        and share
    recipes: {sage: {}, fast: {learning_rate: 6e-4}, nft: {config: configs/miniature_nft.yaml}}

A recipe with a config of its own starts from that one alone, and shares the common settings.

Rollouts and forwards are counted before a run: it ends with the last whole iteration within the budget. Seconds are not
known before: a run goes to its own max_steps, and what it measured is read where its budget was spent.
"""

import json
import re
from typing import Any, NamedTuple

from hyvideo.config.command_line import read_yaml
from hyvideo.config.memory.cost import cost
from hyvideo.evaluation.studies.runs import OF_A_RUN, Recipe, Run, Study, refuse_flags
from hyvideo.evaluation.studies.train_runs import planned

AXES = ("rollouts", "forwards", "seconds")
# What is measured must be the same of all: rewards and videos of other kinds are not compared.
MEASURED = (
    "pretrained_model_root transformer_version valid_video_csv validation_seed validation_repeats validation_steps "
    "validation_height validation_width validation_num_frames validation_shift validation_cfg_scale reward_model "
    "reward_weights"
).split()


class Budget(NamedTuple):
    """Amount that each run may spend of rollouts, of transformer forwards, or of the seconds of its processes."""

    axis: str
    amount: float

    @staticmethod
    def of(text: str) -> "Budget":
        """The budget that ``forwards=20000`` says. Raises ValueError for other text."""
        if not (said := re.fullmatch(rf"({'|'.join(AXES)})=([1-9][0-9]*)", text)):
            raise ValueError(f"--budget must be {', '.join(f'{axis}=N' for axis in AXES)}, got {text!r}")
        return Budget(said[1], int(said[2]))


def read_recipes(path: str) -> tuple[str, list[str], list[Recipe]]:
    """Base config, common flags and recipes of a file. Raises ValueError for a file that does not hold them."""
    content = read_yaml(path)
    match content:
        case {"base": str(base), "recipes": dict(recipes), **rest} if recipes and not rest.keys() - {"common"}:
            parts = {"common": rest.get("common"), **recipes}
        case _:
            raise ValueError(f"{path} must hold base: FILE.yaml, recipes: {{name: {{setting: value}}}}, and may common")
    for name, settings in parts.items():
        if not re.fullmatch(r"[\w.+-]+", str(name)) or not isinstance(settings, dict | None):
            raise ValueError(f"{path}: {name!r} must be a name of letters, digits and _.+- with settings below it")
    flags = {str(name): [*map(str, _flags(settings or {}, path))] for name, settings in parts.items()}
    return base, flags.pop("common"), [Recipe(name, tuple(words)) for name, words in flags.items()]


def _flags(settings: dict[str, Any], path: str) -> list[str]:
    """The flags of post_train.py that say what a YAML file would."""
    words: list[str] = []
    for name, value in settings.items():
        values = value if isinstance(value, list) else [value]
        if None in values:
            raise ValueError(f"{path}: {name} must have a value, got nothing; leave it out, or write '' for empty text")
        texts = [json.dumps(v) if isinstance(v, (bool, dict)) else str(v) for v in values]
        words += [f"--{name}", *texts] if isinstance(value, list) else [f"--{name}={texts[0]}"]
    return words


def within(budget: Budget, study: Study, recipes: list[Recipe]) -> list[Recipe]:
    """The recipes with the iterations that the budget pays for. ValueError for an invalid or incomparable one."""
    found, measured = [], {}
    for recipe in recipes:
        own = OF_A_RUN if budget.axis == "seconds" else (*OF_A_RUN, "max_steps")
        refuse_flags(study.extra, own)
        refuse_flags(recipe.words, {*own} - {"config"})
        try:
            run = planned(study, Run(recipe, 0), trains=False)
        except ValueError as error:
            raise ValueError(f"recipe {recipe.name}: {error}") from error
        resolved = {name: getattr(run.config, name) for name in ("validation_cfg_scale", "validation_shift")}
        settings, spent = run.config.flat() | resolved, cost(run)
        measured = measured or {name: settings[name] for name in MEASURED}
        if others := [name for name in MEASURED if settings[name] != measured[name]]:
            raise ValueError(f"recipe {recipe.name} must have the {', '.join(others)} of the first, to be compared")
        each = {"rollouts": 1, "forwards": spent.forwards_per_rollout}.get(budget.axis)
        steps = int(budget.amount // (spent.rollouts * each)) if each else run.config.optimizer.max_steps
        if not steps:
            raise ValueError(f"{budget.amount:,} {budget.axis} must pay for an iteration of {recipe.name}, and do not")
        found.append(Recipe(recipe.name, (*recipe.words, f"--max_steps={steps}")))
    return found
