"""Files of a run that must go together: its settings in two of them, and the saved videos."""

from pathlib import Path
from typing import NamedTuple

from scripts.audit.run import Run, read_json
from scripts.audit.statements import Audit

TOPIC = "Files"


def audit_files(run: Run, audit: Audit) -> None:
    text = "the settings of the run are the same in both files"
    with audit.compare(TOPIC, text, "config.yaml, run.json") as rows:
        recorded = read_json(run.folder / "run.json")["settings"]
        given = {name: value for name, value in recorded.items() if value is not None}
        own = {name: value for name, value in run.settings.items() if name != "environment"}
        for name in dict.fromkeys([*given, *own]):
            rows.equal(name, given.get(name), own.get(name))
    text = "saved videos are there, with the frames, size and rate of the settings"
    with audit.compare(TOPIC, text, "rollouts/ and samples/, *.mp4, config.yaml") as rows:
        for folder, entries in run.scores.items():
            expected = shape_of(run, is_validation=folder.parent.name == "samples")
            for entry in entries:
                if entry["file"]:
                    where = f"{folder.parent.name}/{folder.name}/{entry['file']}"
                    found = shape_in(folder / entry["file"], expected)
                    rows.equal(where, str(expected), str(found or "no file"))


class Shape(NamedTuple):
    frames: int
    width: int
    height: int
    rate: float

    def __str__(self) -> str:
        return (
            f"{self.frames} frames of {self.width} x {self.height} at {self.rate:.4g} frames per "
            "second"
        )


def shape_of(run: Run, *, is_validation: bool) -> Shape:
    """Return what the settings say of the videos."""
    names = ("height", "width", "sample_n_frames")
    height, width, frames = (run.settings[name] for name in names)
    if is_validation:
        height = run.get("validation_height") or height
        width = run.get("validation_width") or width
        frames = run.get("validation_num_frames") or frames
    return Shape(frames, width, height, float(run.settings["fps"]))


def shape_in(file: Path, expected: Shape) -> Shape | None:
    """Return what a video is; None without it. Small videos are saved several times as large."""
    import av

    if not file.is_file():
        return None
    with av.open(str(file)) as opened:
        video = opened.streams.video[0]
        found = Shape(video.frames, video.width, video.height, float(video.average_rate))
    times = found.height // expected.height
    if times > 1 and (found.width, found.height) == (
        times * expected.width,
        times * expected.height,
    ):
        found = found._replace(width=expected.width, height=expected.height)
    return found
