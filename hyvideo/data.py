"""Prompts from a CSV file, and which of them an iteration trains on.

The position in the data is a function of the iteration, so a resumed run goes on where it stopped without a cursor.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from hyvideo.distributed.randomness import permutation


def read_prompts(path: str | Path) -> list[str]:
    """The column ``prompt`` of a CSV file, in order.

    Raises: ValueError for a file that is missing, not text, without the column, or without a prompt in some row.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if "prompt" not in (reader.fieldnames or []):
                columns = ", ".join(reader.fieldnames or []) or "no columns"
                raise ValueError(f"a prompts CSV needs a column named `prompt`, got {columns} in {path}")
            prompts = [(row["prompt"] or "").strip() for row in reader]
    except OSError as error:
        raise ValueError(f"a prompts CSV must be a readable file, got {str(path)!r} ({error.strerror})") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"a prompts CSV must be UTF-8 text in CSV form, got {str(path)!r} ({error})") from error
    if not prompts:
        raise ValueError(f"a prompts CSV must have at least one row, got none in {path}")
    if "" in prompts:
        raise ValueError(f"every row of a prompts CSV needs a prompt, row {prompts.index('') + 1} of {path} has none")
    return prompts


@dataclass(frozen=True)
class PromptOrder:
    """Walks through all prompts in a random order, then through another, and so on."""

    num_prompts: int
    prompts_per_iteration: int
    seed: int

    def indices(self, iteration: int) -> list[int]:
        """Prompts of an iteration, counted from 1. They repeat only when a round needs more than there are."""
        first = (iteration - 1) * self.prompts_per_iteration
        return [self._at(position) for position in range(first, first + self.prompts_per_iteration)]

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self.num_prompts)
        return permutation(self.num_prompts, self.seed, "prompt order", epoch)[place]
