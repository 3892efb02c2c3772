"""The report as one self-contained HTML file: Jinja templates, Plotly's script and the videos."""

import os
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import fmean
from urllib.parse import quote as quote_url
from urllib.parse import unquote

from jinja2 import TemplateError

from hyvideo.config.objectives import label_of
from hyvideo.config.settings import Config
from hyvideo.data.templates import fill
from hyvideo.records.run_files import evenly_spaced, write_text
from hyvideo.report.clips import Clips, Row, alternate, embed
from hyvideo.report.comparison import Comparison, read_comparison
from hyvideo.report.contents import Run
from hyvideo.report.gallery import match_videos

REPORT_FILE = "report.html"
MAX_POINTS = 1500  # iterations in the curves of all runs
NUM_EXTREMES = 4  # worst and best videos that are each included before a random sample
SHOWN = ("prompt", "image", "seed", "file")  # entries of a generated video


def write_report(folders: Iterable[Path], out: Path) -> None:
    """Write the page of the folders, at most 15 MB. Raises ValueError for a folder of no kind or corrupted records.

    Large videos are shown as previews, with a link to the file relative to ``out``.
    """
    places = [folder.resolve() for folder in folders]
    try:
        page = _page(read_comparison(places), out.resolve().parent)
    except (LookupError, TypeError, AttributeError, TemplateError) as error:
        raise ValueError(f"{', '.join(map(str, places))}: the records of a run are corrupted: {error!r}") from error
    write_text(out, page)


def _page(found: Comparison, place: Path) -> str:
    """Return the text of a page in the folder ``place``."""
    from plotly.offline import get_plotlyjs  # only reports need it

    rows = match_videos(list(found.videos.values()))
    clips = embed(alternate(compared_files(found.runs.values()), map(_files, rows)))
    videos = {name: compared_videos(run, clips, place) for name, run in found.runs.items()}
    data = {
        "runs": {name: page_data(run, len(found.runs)) | {"videos": videos[name]} for name, run in found.runs.items()},
        "scores": found.scores,
        "folders": list(found.videos),
        "rows": folder_videos(rows, clips, place),
        "clips": clips.contents,
        "originals": clips.originals,
    }
    return fill(
        Path(__file__).with_name("page.html.j2"),
        found=found,
        runs=found.runs,
        data=data,
        defaults_of=Config.of_version,
        label_of=label_of,
        plotly=get_plotlyjs(),
        num_matched=len(rows),
        videos_note=videos_note(videos),
    )


def page_data(run: Run, num_runs: int) -> dict:
    """Return the data that the page draws of a run, except its videos, thinned for long runs."""
    last = len(run.lines) - 1
    rows = [*evenly_spaced(MAX_POINTS // (2 + num_runs), last), last] if run.lines else []
    names = dict.fromkeys(name for line in run.lines for name in line)
    shifts = [{shift.name: shift.shift / shift.allowed for shift in each} for each in run.shifts]
    return {
        "rollouts": run.rollouts_per_iteration,
        "hours": [run.hours[row] for row in rows],
        "metrics": {name: [run.lines[row].get(name) for row in rows] for name in names},
        "validations": [asdict(stats) | {"shifts": each} for stats, each in zip(run.history, shifts)],
        "timeline": run.timeline,
        "weights": run.config.reward_weights,
        "moves": run.config.anchor_moves,
    }


def compared_files(runs: Iterable[Run]) -> Iterator[Row]:
    """Yield the files of each validation video, before and after training in all runs, those to show first at first.

    The first are those with the smallest and the largest mean gain, the others are in random order.
    """
    entries: dict[tuple, list[dict]] = {}
    gains: dict[tuple, list[float]] = {}
    for run in runs:
        for number, entry in chain(run.before.items(), run.after.items()):
            entries.setdefault(_key(entry), []).append(entry)
            gains.setdefault(_key(entry), []).append(run.gains.get(number, 0.0))
    by_gain = sorted(entries, key=lambda key: fmean(gains[key]))
    drawn = random.Random(0).sample(list(entries), len(entries))
    for key in dict.fromkeys([*by_gain[:NUM_EXTREMES], *by_gain[-NUM_EXTREMES:], *drawn]):
        yield _files(entries[key])


def compared_videos(run: Run, clips: Clips, place: Path) -> list[dict]:
    """Return the validation videos before and after training, smallest gain first."""
    numbers = sorted(run.after or run.before)
    drawn = {number: rank for rank, number in enumerate(random.Random(0).sample(numbers, len(numbers)))}
    return [
        {
            "gain": run.gains.get(number),
            "drawn": drawn[number],
            "before": _on_page(run.before.get(number), clips, place),
            "after": _on_page(run.after.get(number), clips, place),
        }
        for number in sorted(numbers, key=lambda number: run.gains.get(number, 0.0))
    ]


def folder_videos(rows: list[list[dict | None]], clips: Clips, place: Path) -> list[list[dict | None]]:
    """Return the rows of matching videos of several folders that have an embedded video."""
    shown = [row for row in rows if any(file in clips.digests for file in _files(row))]
    return [
        [video and _on_page({name: video.get(name) for name in SHOWN}, clips, place) for video in row] for row in shown
    ]


def videos_note(videos: Mapping[str, list[dict]]) -> str:
    """Return how many of the validation videos are saved and shown, as a sentence; ``videos`` are those of each run."""
    entries: dict[tuple, list[dict]] = {}
    for video in chain(*videos.values()):
        for entry in filter(None, (video["before"], video["after"])):
            entries.setdefault(_key(entry), []).append(entry)
    saved = [each for each in entries.values() if any(entry["file"] for entry in each)]
    shown = [each for each in saved if any("clip" in entry for entry in each)]
    if not saved:
        return "No videos are saved; log_num_videos sets how many a validation saves."
    places = dict.fromkeys(os.path.dirname(entry["file"]) for entry in chain(*saved) if entry["file"])
    where = f"{len(saved)} of {len(entries)} validation videos are saved in {', '.join(map(unquote, places))}"
    if not shown:
        return f"{where}, but none of them can be shown: they cannot be read or are too large for this page."
    if len(shown) < len(saved):
        return f"{where}; this page shows the {len(shown)} of them that fit."
    return f"{len(shown)} of {len(entries)} validation videos are shown (log_num_videos), selected before scoring."


def _key(entry: dict) -> tuple:
    """Return what the entries of a video have in common, before and after training and in all runs."""
    return entry["prompt"], entry["seed"], entry["number"]


def _files(entries: Iterable[dict | None]) -> Row:
    return [Path(entry["file"]) for entry in entries if entry and entry["file"]]


def _on_page(entry: dict | None, clips: Clips, place: Path) -> dict | None:
    """Return an entry with a relative link as ``file`` and, if the video is embedded, its digest as ``clip``."""
    if not entry or not entry["file"]:
        return entry
    file = Path(entry["file"])
    found = {"clip": clips.digests[file]} if file in clips.digests else {}
    return entry | {"file": quote_url(os.path.relpath(file, place))} | found
