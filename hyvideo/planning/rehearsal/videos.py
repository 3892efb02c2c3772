"""Stand-ins for given videos that do not exist yet."""

from pathlib import Path

from PIL import Image

from hyvideo.data import examples, pairs
from hyvideo.data.csv_files import csv_text
from hyvideo.data.files import find_path
from hyvideo.data.videos import write_video
from hyvideo.models.versions import version_defaults
from hyvideo.rewards.trial import trial_videos
from hyvideo.settings.config import Config
from hyvideo.settings.objectives import DPOSettings

PROMPTS = (
    "a red ball flies in front of a stone wall",
    "a ball crosses the picture from left to right",
    'a red ball before a wall with the words "no stopping"',
    "a wall, and a ball that flies past it in a high arc",
)  # one of them is held out


def lacks_videos(config: Config) -> bool:
    """Return whether a run trains on given videos, and none of its files exists."""
    source = config.objective.videos_from
    paths = getattr(config.objective, source) if source else []
    return bool(paths) and not any(find_path(path).is_file() for path in paths)


def write_videos(folder: Path, config: Config) -> Path:
    """Write two videos of the run's size and a CSV file of them: their answers to the questions of
    the run, or their scores. Return the CSV file.
    """
    folder.mkdir(parents=True)
    videos = dict(zip(("first.mp4", "second.mp4"), trial_videos(*config.sampling.size)))
    for name, pixels in videos.items():
        write_video(folder / name, pixels, config.data.fps)
    image = ""
    if version_defaults(config.model.transformer_version).task == "i2v":
        image = "first.png"
        frame = videos["first.mp4"][0].permute(1, 2, 0).numpy()
        Image.fromarray(frame).save(folder / image)
    path = folder / "videos.csv"
    if isinstance(config.objective, DPOSettings):
        columns = [*pairs.COLUMNS, "dimension", "ref_image_path"]
        rows = [
            [prompt, *videos, "first", dimension, image]
            for dimension in config.objective.dimension_weights or ("",)
            for prompt in PROMPTS
        ]
    else:
        columns = [*examples.COLUMNS, "score", "ref_image_path"]
        rows = [
            [prompt, name, score, image] for prompt in PROMPTS for score, name in enumerate(videos)
        ]
    path.write_text(csv_text(columns, rows), encoding="utf-8")
    return path
