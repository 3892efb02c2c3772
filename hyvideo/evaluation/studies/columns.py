"""Columns of a study's tables: measures of a policy, and their mean and interval over its training seeds.

Measures of a video (Overall, VQ, ..., the true reward) get a t interval over training seeds and prompts; measures of a
whole set (the Frechet distance, all of a validation) have one value a seed, and get one over seeds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hyvideo.config.settings import REWARD_PRESETS
from hyvideo.evaluation.scores_file import Evaluation, by_prompt
from hyvideo.evaluation.studies.cells import SETTINGS
from hyvideo.evaluation.studies.intervals import Interval, t_interval


@dataclass(frozen=True)
class Column:
    """A measure of a table."""

    name: str
    of_set: str = ""  # name among the measures of the whole set; empty for a score of each video
    higher_is_better: bool = True

    def of_video(self, entry: dict, setting: str) -> float | None:
        if self in (REWARD, TRUE_REWARD):
            return weighted_reward(entry, setting, "true/" if self == TRUE_REWARD else "")
        return entry.get(self.name)

    def by_prompt(self, evaluation: Evaluation, setting: str) -> dict[int, float]:
        """Mean of each prompt that has a value; a measure of a whole set is as one of a single prompt."""
        if not self.of_set:
            return by_prompt(evaluation.videos, lambda entry: self.of_video(entry, setting))
        value = evaluation.measures.get(self.of_set)
        return {} if value is None else {0: value}


def weighted_reward(entry: dict, setting: str, prefix: str = "") -> float | None:
    """The reward of a setting; with ``true/`` as prefix, of the measured truth in place of the scorer's opinion."""
    weights = REWARD_PRESETS[SETTINGS[setting]]
    values = [entry.get(f"{prefix}{name}") for name in weights]
    return None if None in values else sum(weight * value for weight, value in zip(weights.values(), values))


REWARD, TRUE_REWARD = Column("Reward"), Column("True reward")
FRECHET = Column("Frechet distance", of_set="frechet_distance", higher_is_better=False)


def intervals(evaluations: list[Evaluation], columns: Iterable[Column], setting: str = "") -> dict[str, Interval]:
    """Mean and interval of every column that each seed's evaluation has a value of, by its name."""
    found = {}
    for column in columns if evaluations else ():
        tables = [column.by_prompt(evaluation, setting) for evaluation in evaluations]
        prompts = sorted(set().union(*tables))
        values = [[table.get(prompt, np.nan) for prompt in prompts] for table in tables]
        interval = t_interval(np.array(values, dtype=float).reshape(len(tables), len(prompts)))
        if np.isfinite(interval.mean):
            found[column.name] = interval
    return found
