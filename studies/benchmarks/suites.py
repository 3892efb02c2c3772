"""The benchmarks VBench and VBench-2.0: dimensions, numbers of prompts and totals, from
suites.yaml.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

from hyvideo.data.text import quote

TOTAL = "total"


@dataclass(frozen=True)
class Dimension:
    """A dimension of a benchmark; its normalized score is (score - min) / (max - min)."""

    category: str
    prompts: int  # published number
    videos: int | None = None  # per prompt; None: as in the benchmark
    min: float = 0.0
    max: float = 1.0
    weight: float = 1.0  # within the category
    row_scale: float = 1.0  # unit of the videos' scores in result files
    # whether the number in a scored video's name does not identify its seed
    is_renumbered: bool = False


@dataclass(frozen=True)
class Suite:
    """A benchmark."""

    title: str
    videos: int  # per prompt
    categories: dict[str, float]  # weight in the total
    dimensions: dict[str, Dimension]  # of one category follow one another
    name_length: int | None = None  # characters of the prompt in a file name; None: all
    has_folders: bool = False  # the videos of each dimension are in a folder of their own
    drops_videos: bool = False  # a score of -1 stands for a video that does not count
    long_seconds: float | None = None  # length from which another suite is asked for

    @property
    def rows(self) -> dict[str, str]:
        """Names and kinds: the total, then each category followed by its dimensions."""
        rows = {TOTAL: TOTAL}
        for name, each in self.dimensions.items():
            rows[each.category] = "category"
            rows[name] = "dimension"
        return rows

    def factors(self, row: str) -> dict[str, float]:
        """Return the factors of (score - min) by dimension whose sum is a row; 1 for a dimension's
        raw score.
        """
        if row in self.dimensions:
            return {row: 1.0}
        weights = self.categories if row == TOTAL else {row: 1.0}
        members = {name: each for name, each in self.dimensions.items() if each.category in weights}
        sums = {
            c: sum(each.weight for each in members.values() if each.category == c) for c in weights
        }
        shares = {c: weight / sum(weights.values()) / sums[c] for c, weight in weights.items()}
        return {
            name: shares[each.category] * each.weight / (each.max - each.min)
            for name, each in members.items()
        }

    def score(self, row: str, scores: dict[str, float]) -> float:
        """Return a row from the raw scores of its dimensions."""
        if row in self.dimensions:
            return scores[row]
        return sum(
            factor * (scores[name] - self.dimensions[name].min)
            for name, factor in self.factors(row).items()
        )


def suite_of(dimensions: set[str], where: object) -> Suite:
    """Return the benchmark with these dimensions.

    Raises ValueError, naming ``where``, for any other one.
    """
    suite = max(SUITES.values(), key=lambda suite: len(dimensions & suite.dimensions.keys()))
    other = sorted(dimensions - suite.dimensions.keys())
    if other or not dimensions:
        raise ValueError(
            f"{where} must have dimensions of {suite.title}, got "
            f"{quote(', '.join(other) or 'none')}"
        )
    return suite


def _read_suites() -> dict[str, Suite]:
    tables = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    suites = {}
    for name, table in tables.items():
        dimensions = {row: Dimension(**values) for row, values in table["dimensions"].items()}
        others = {key: value for key, value in table.items() if key != "dimensions"}
        suites[name] = Suite(dimensions=dimensions, **others)
    return suites


SUITES = _read_suites()
