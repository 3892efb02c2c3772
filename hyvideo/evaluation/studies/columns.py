"""Columns of a study's tables: metrics of a policy, with mean and interval over its training seeds.

Metrics of single videos (Overall, VQ, ..., the true reward) get a t interval over training seeds and prompts. Metrics
of a whole set (the Fréchet distance, all of a validation) have one value per seed and get an interval over seeds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hyvideo.config.settings import REWARD_PRESETS
from hyvideo.evaluation.scores_file import Evaluation, by_prompt
from hyvideo.evaluation.studies.cells import SETTINGS
from hyvideo.evaluation.studies.intervals import Interval, t_interval

UNSEEN = ", unseen prompts"  # suffix of columns over the prompts that are no training prompts


@dataclass(frozen=True)
class Column:
    """A metric of a table."""

    name: str
    of_set: str = ""  # key among the metrics of the whole set; empty for a score of each video
    higher_is_better: bool = True

    def video_value(self, entry: dict, setting: str) -> float | None:
        name = self.name.removesuffix(UNSEEN)
        if name != self.name and entry.get("seen", True):
            return None
        if name in (REWARD.name, TRUE_REWARD.name):
            return weighted_reward(entry, setting, "true/" if name == TRUE_REWARD.name else "")
        return entry.get(name)

    def by_prompt(self, evaluation: Evaluation, setting: str) -> dict[int, float]:
        """Return the mean of each prompt that has a value; a metric of a whole set counts as one prompt."""
        if not self.of_set:
            return by_prompt(evaluation.videos, lambda entry: self.video_value(entry, setting))
        value = evaluation.measures.get(self.of_set)
        return {} if value is None else {0: value}


def weighted_reward(entry: dict, setting: str, prefix: str = "") -> float | None:
    """Return the reward of a video under a setting; with prefix ``true/``, its true reward."""
    weights = REWARD_PRESETS[SETTINGS[setting]]
    values = [entry.get(f"{prefix}{name}") for name in weights]
    return None if None in values else sum(weight * value for weight, value in zip(weights.values(), values))


REWARD, TRUE_REWARD = Column("Reward"), Column("True reward")
FRECHET = Column("Frechet distance", of_set="frechet_distance", higher_is_better=False)


def intervals(evaluations: list[Evaluation], columns: Iterable[Column], setting: str = "") -> dict[str, Interval]:
    """Return mean and interval by name of each column that has a value in every seed's evaluation."""
    found = {}
    for column in columns if evaluations else ():
        tables = [column.by_prompt(evaluation, setting) for evaluation in evaluations]
        prompts = sorted(set().union(*tables))
        values = [[table.get(prompt, np.nan) for prompt in prompts] for table in tables]
        interval = t_interval(np.array(values, dtype=float).reshape(len(tables), len(prompts)))
        if np.isfinite(interval.mean):
            found[column.name] = interval
    return found
