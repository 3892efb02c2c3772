"""Result files of VBench and VBench-2.0, ``*_eval_results.json``.

    {dimension: [score, [{"video_path": ".../<prompt>-<number>.mp4", "video_results": score of the video}, ...]]}

Scores of videos may be booleans. VBench-2.0 marks a video that does not count with -1. VBench lists
two prompts twice.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from hyvideo.data.files import read_json
from hyvideo.data.text import quote
from hyvideo.validation.scores_file import mean_by_prompt
from studies.benchmarks.suites import Suite, suite_of

# result files; folder of VBench's static filter
FILES = "*_eval_results.json"
FILTERED = "filtered_videos"
Videos = dict[tuple[str, int], float]  # scores by prompt and number


@dataclass(frozen=True)
class Result:
    """Result of one dimension: the official score, and the scores of the videos that count."""

    score: float
    videos: Videos
    num_videos: int
    num_dropped: int
    is_filtered: bool  # whether all videos are from the static filter


Run = dict[str, Result]  # of one run of a policy, by dimension


def by_prompt(videos: Videos) -> dict[str, float]:
    """Return the mean score of each prompt."""
    return mean_by_prompt((prompt, score) for (prompt, _), score in videos.items())


def difference(first: Result, second: Result) -> dict[str, float]:
    """Return the second minus the first by prompt, over the videos that both have."""
    return by_prompt(
        {key: second.videos[key] - x for key, x in first.videos.items() if key in second.videos}
    )


def read_results(words: list[str]) -> list[tuple[Suite, dict[str, list[Run]]]]:
    """Return runs by benchmark and policy from ``name=path``; equal names are runs of one
    policy.
    """
    found: dict[str, tuple[Suite, dict[str, list[Run]]]] = {}
    for word in words:
        name, _, path = word.partition("=")
        if not (name and path):
            raise ValueError(f"results must be given as name=path, got {quote(word)}")
        suite, run = read_run(Path(path))
        _, policies = found.setdefault(suite.title, (suite, {}))
        policies.setdefault(name, []).append(run)
    return list(found.values())


def read_run(path: Path) -> tuple[Suite, Run]:
    """Read a result file, or all in a folder.

    Raises ValueError for an invalid file or a dimension in two files.
    """
    tables = {}
    owners = {}
    files = sorted(path.rglob(FILES)) if path.is_dir() else [path]
    for file in files:
        for name, table in read_json(file, "results").items():
            if name in tables:
                raise ValueError(
                    f"{name} must be in one result file, got {owners[name]} and {file}; delete one "
                    "of them"
                )
            tables[name] = table
            owners[name] = file
    if not tables:
        raise ValueError(
            f"{path} must have files {FILES}, got none; run the commands that `make` prints first"
        )
    suite = suite_of(set(tables), path)
    return suite, {
        name: _result(suite, name, table, f"{name} in {owners[name]}")
        for name, table in tables.items()
    }


def _result(suite: Suite, name: str, table: object, where: str) -> Result:
    try:
        score, rows = table
        numbers = {row["video_path"]: float(row["video_results"]) for row in rows}
        kept = {
            Path(path): x for path, x in numbers.items() if not (suite.drops_videos and x == -1)
        }
        keys = [re.fullmatch(r"(.+)-(\d+)", path.stem, re.DOTALL).groups() for path in kept]
        if not kept or not all(map(math.isfinite, [score, *kept.values()])):
            raise ValueError("no video counts, or a score is not finite")
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{where} must be [score, [{{video_path: PROMPT-NUMBER.mp4, video_results: number}}, "
            f"...]], got {quote(table)} ({error})"
        ) from error
    dimension = suite.dimensions[name]
    videos = {
        (prompt, int(number)): x / dimension.row_scale
        for (prompt, number), x in zip(keys, kept.values())
    }
    if dimension.is_renumbered:
        videos = {(prompt, 0): x for prompt, x in by_prompt(videos).items()}
    is_filtered = all(FILTERED in path.parts for path in kept)
    return Result(score, videos, len(kept), len(numbers) - len(kept), is_filtered)
