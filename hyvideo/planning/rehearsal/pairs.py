"""Stand-ins for rated pairs that do not exist yet."""

from pathlib import Path

from hyvideo.data.csv_files import csv_text
from hyvideo.data.files import find_path
from hyvideo.data.pairs import COLUMNS
from hyvideo.data.videos import write_video
from hyvideo.rewards.trial import trial_videos
from hyvideo.settings.config import Config

PROMPTS = (
    "a red ball flies in front of a stone wall",
    "a ball crosses the picture from left to right",
    'a red ball before a wall with the words "no stopping"',
    "a wall, and a ball that flies past it in a high arc",
)  # one of them is held out


def lacks_pairs(config: Config) -> bool:
    """Return whether a run needs rated pairs, and none of its files exists."""
    if not config.objective.videos_from:
        return False
    return not any(find_path(path).is_file() for path in config.objective.pairs_csv)


def write_pairs(folder: Path, config: Config) -> Path:
    """Write two videos of the run's size, and their answers to the questions of the run; return the
    CSV file.
    """
    folder.mkdir(parents=True)
    first, second = trial_videos(*config.sampling.size)
    write_video(folder / "first.mp4", first, config.data.fps)
    write_video(folder / "second.mp4", second, config.data.fps)
    path = folder / "pairs.csv"
    rows = [
        [prompt, "first.mp4", "second.mp4", "first", dimension]
        for dimension in config.objective.dimension_weights or ("",)
        for prompt in PROMPTS
    ]
    path.write_text(csv_text([*COLUMNS, "dimension"], rows), encoding="utf-8")
    return path
