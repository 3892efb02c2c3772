"""Settings of objective dpo."""

from collections.abc import Mapping
from typing import Literal

from pydantic import field_validator

from hyvideo.data.examples import PAIRS_FILE, Examples, file_in_study
from hyvideo.data.pairs import read_ratings, select_preferences, split_by_prompt
from hyvideo.settings.objectives.base import GivenVideosSettings
from hyvideo.settings.problems import Problems
from hyvideo.settings.sections import RolloutSettings, learning


class DPOSettings(GivenVideosSettings):
    """Preferences in CSV files, without rollouts."""

    name = "dpo"
    label = "DPO"
    sentence = "preferences in pairs_csv, without rollouts"
    class_path = "hyvideo.training.objectives.dpo:DPO"
    trains = "levels"
    videos_from = "pairs_csv"
    group_size = 2  # a winner and a loser
    example = "pair"
    needs_velocities = True
    checks_velocities = True

    pairs_csv: list[str] = learning(
        [],
        "Rated pairs of videos, folders of scripts.rate or tables: `prompt`, `first`, `second`, "
        "`answer`, optionally `dimension`, `ref_image_path`, `ref_last_image_path`, or public forms.",
        is_path=True,
    )
    pair_weights: dict[str, float] = learning(
        {}, "Weights of the dimensions of pairs_csv, as JSON; default: all equally."
    )
    dpo_beta: float = learning(
        100.0, "Strength of a preference: larger values stay closer to the base model.", gt=0
    )
    nft_levels: int = learning(4, "Noise levels that are trained per pair.", ge=1)
    kl_strategy: Literal["fixed"] = learning("fixed", "KL to the base model, which is needed.")
    kl_weight: float = learning(1.0, "Largest coefficient of the KL term.", gt=0)

    @field_validator("pairs_csv")
    @classmethod
    def _are_files(cls, paths: list[str]) -> list[str]:
        return [file_in_study(path, PAIRS_FILE, "pairs_csv") for path in paths]

    def read_videos(self, seed: int) -> Examples:
        ratings = [rating for path in self.pairs_csv for rating in read_ratings(path)]
        source = ", ".join(self.pairs_csv)
        found = select_preferences(ratings, self.pair_weights, source)
        return split_by_prompt(found, seed)

    @property
    def method(self) -> str:
        return f"beta {self.dpo_beta:g}"

    def problems(
        self, rollout: RolloutSettings, *, guidance: Mapping[str, float], rows_per_pass: int
    ) -> Problems:
        """Yield batches that divide a pair, and what all given videos cannot be used with."""
        yield from super().problems(rollout, guidance=guidance, rows_per_pass=rows_per_pass)
        sizes = {"batch_size": rollout.batch_size}
        if rows_per_pass > 1:
            sizes["mini_batch_size_per_update"] = rows_per_pass
        for setting, size in sizes.items():
            if size % 2:
                yield (
                    f"objective {self.name} needs an even {setting}, because both videos of a pair "
                    f"belong together, got {size}; use {size + 1}"
                )
