"""Recipes of a YAML file, each with as many iterations as a budget allows.

A file that compares two configs has a line for each, a name and the config:

    sage: configs/miniature.yaml
    nft: configs/miniature_nft.yaml

A longer form changes settings:

    base: configs/miniature.yaml            base config of all recipes
    common: {validation_interval: 5}        settings of all recipes
    recipes: {sage: {}, fast: {learning_rate: 6e-4}, guidance: {config: configs/miniature_guidance.yaml, control: true}}

A recipe with a ``config`` uses it instead of the base config, together with the common settings.
One with ``control`` is also trained without the reward (``ignore_rewards``), as the recipe
``<name>_control``. All recipes are validated as the first one: with its prompts, size, steps and
guidance.

With a budget of rollouts or forwards, a run ends with the last whole iteration within the budget.
With a budget of seconds, it runs to max_steps, and its metrics are read at the time when the budget
was spent.
"""

import json
import re
from dataclasses import replace
from typing import Any, NamedTuple

from hyvideo.files.files import find_path
from hyvideo.files.yaml_files import read_yaml
from hyvideo.planning.hours import forwards_per_rollout
from hyvideo.settings.config import Config
from studies.recipes.runs import RUN_FLAGS, Recipe, RecipeRun, RecipeStudy, reject_flags
from studies.recipes.train_runs import planned

AXES = ("rollouts", "forwards", "seconds")
# Settings that must be the same for all recipes, so that their metrics can be compared.
MEASURED = (
    "pretrained_model_root transformer_version reward_model reward_weights validation_sigmas "
    "validation_noise validation_low_noise_cfg_scale"
).split()
# The same, which recipes take from the first one.
OF_VALIDATION = (
    "valid_video_csv validation_seed validation_repeats validation_steps validation_height "
    "validation_width validation_num_frames validation_shift validation_cfg_scale"
).split()


class Budget(NamedTuple):
    """Budget of each run: rollouts, transformer forward passes, or seconds of its processes."""

    axis: str
    amount: float

    @staticmethod
    def of(text: str) -> "Budget":
        """Parse text like ``forwards=20000``. Raises ValueError for other text."""
        match = re.fullmatch(rf"({'|'.join(AXES)})=([1-9][0-9]*)", text)
        if not match:
            raise ValueError(
                f"--budget must be {' or '.join(f'{axis}=N' for axis in AXES)}, got {text!r}"
            )
        return Budget(match[1], int(match[2]))


def read_recipes(path: str) -> tuple[str, list[str], list[Recipe]]:
    """Read base config, common flags and recipes from a file.

    Raises ValueError for a file of another form, and for a config that does not exist.
    """
    content = read_yaml(path)
    if "recipes" not in content:
        configs = content
        first = next(iter(configs.values()), None)
        content = {"base": first, "recipes": {name: {"config": configs[name]} for name in configs}}
    base = content.get("base")
    if not isinstance(base, str):
        raise ValueError(
            f"{path} must have a line NAME: CONFIG.yaml for each recipe, or base: FILE.yaml and "
            "recipes: {name: {setting: value}}"
        )
    recipes = []
    for name, settings in content["recipes"].items():
        settings = dict(settings or {})
        if "config" in settings and not find_path(settings["config"]).is_file():
            raise ValueError(f"{path}, recipe {name}: file not found: {settings['config']}")
        has_control = settings.pop("control", False)
        words = tuple(_flags(settings))
        recipes.append(Recipe(str(name), words))
        if has_control:
            control = (*words, "--ignore_rewards=true")
            recipes.append(Recipe(f"{name}_control", control, str(name)))
    return base, _flags(content.get("common") or {}), recipes


def _flags(settings: dict[str, Any]) -> list[str]:
    """Return the flags of post_train.py for settings of a YAML file."""
    words: list[str] = []
    for name, value in settings.items():
        values = value if isinstance(value, list) else [value]
        texts = [json.dumps(v) if isinstance(v, (bool, dict)) else str(v) for v in values]
        if isinstance(value, list):
            words += [f"--{name}", *texts]
        else:
            words.append(f"--{name}={texts[0]}")
    return words


def measured_settings(config: Config) -> dict[str, Any]:
    """Return the values in use of `MEASURED` and `OF_VALIDATION`."""
    sampling = config.validation_sampling
    resolved = {
        "validation_num_frames": sampling.frames,
        "validation_height": sampling.height,
        "validation_width": sampling.width,
        "validation_cfg_scale": sampling.guidance_scale,
        "validation_low_noise_cfg_scale": sampling.low_noise_guidance_scale,
        "validation_shift": sampling.shift,
        "validation_sigmas": sampling.sigmas,
        "validation_noise": sampling.noise,
    }
    settings = config.flat() | resolved
    return {name: settings[name] for name in (*MEASURED, *OF_VALIDATION)}


def _sets(recipe: Recipe, name: str) -> bool:
    """Return whether a recipe sets a setting itself, not only by its config."""
    return any(word.partition("=")[0] == f"--{name}" for word in recipe.words)


def limit_to_budget(budget: Budget, study: RecipeStudy, recipes: list[Recipe]) -> list[Recipe]:
    """Return the recipes with the iterations that the budget allows and the validation of the first
    recipe.

    Raises ValueError if they are not comparable.
    """
    found = []
    measured = {}
    for recipe in recipes:
        fixed = RUN_FLAGS if budget.axis == "seconds" else (*RUN_FLAGS, "max_steps")
        reject_flags(study.extra, fixed)
        reject_flags(recipe.words, set(fixed) - {"config"})
        try:
            run = planned(study, RecipeRun(recipe, 0), trains=False)
        except ValueError as error:
            raise ValueError(f"recipe {recipe.name}: {error}") from error
        settings = measured_settings(run.config)
        measured = measured or settings
        shared = {
            name: measured[name]
            for name in OF_VALIDATION
            if settings[name] != measured[name] and not _sets(recipe, name)
        }
        if shared:
            recipe = replace(recipe, words=(*recipe.words, *_flags(shared)))
            run = planned(study, RecipeRun(recipe, 0), trains=False)
            settings = measured_settings(run.config)
        others = [
            f"{name} ({settings[name]}, not {measured[name]})"
            for name in measured
            if settings[name] != measured[name]
        ]
        if others:
            raise ValueError(
                f"recipe {recipe.name} must have the same {', '.join(others)} as the first recipe, "
                "so that their metrics can be compared; set it in common"
            )
        steps = run.config.optimizer.max_steps
        if budget.axis == "rollouts":
            steps = int(budget.amount // run.plan.rollouts)
        elif budget.axis == "forwards":
            steps = int(budget.amount // (run.plan.rollouts * forwards_per_rollout(run)))
        if not steps:
            raise ValueError(
                f"a budget of {budget.amount:,} {budget.axis} is less than one iteration of "
                f"{recipe.name}"
            )
        found.append(replace(recipe, words=(*recipe.words, f"--max_steps={steps}")))
    return found
