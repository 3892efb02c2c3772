"""The report as one self-contained HTML file: Jinja templates, Plotly's script and the videos."""

import base64
import hashlib
import random
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from jinja2 import TemplateError

from hyvideo.config.settings import Config
from hyvideo.data.templates import fill
from hyvideo.evaluation.report.comparison import Comparison, read_comparison
from hyvideo.evaluation.report.contents import Run
from hyvideo.evaluation.report.gallery import match_videos
from hyvideo.records.run_files import evenly_spaced, write_text

REPORT_FILE = "report.html"
MAX_POINTS = 1500  # iterations in the curves of all runs
MAX_CLIP_BYTES = 5_500_000  # of all runs; base64 adds a third
NUM_EXTREMES = 4  # worst and best videos that are each included before a random sample


def write_report(folders: Iterable[Path], out: Path) -> None:
    """Write the page of the folders, at most 15 MB. Raises ValueError for a folder of no kind or corrupted records."""
    places = [folder.resolve() for folder in folders]
    try:
        page = _page(read_comparison(places))
    except (LookupError, TypeError, AttributeError, TemplateError) as error:
        raise ValueError(f"{', '.join(map(str, places))}: the records of a run are corrupted: {error!r}") from error
    write_text(out, page)


def _page(found: Comparison) -> str:
    from plotly.offline import get_plotlyjs  # only reports need it

    clips: dict[str, str] = {}
    room = MAX_CLIP_BYTES // (len(found.runs) + len(found.videos) or 1)
    data = {
        "runs": {name: page_data(run, clips, len(found.runs), room) for name, run in found.runs.items()},
        "scores": found.scores,
        "folders": list(found.videos),
        "rows": folder_videos([*found.videos.values()], clips, room * len(found.videos)),
        "clips": clips,
    }
    template = Path(__file__).with_name("page.html.j2")
    return fill(
        template,
        found=found,
        runs=found.runs,
        data=data,
        defaults_of=Config.of_version,
        plotly=get_plotlyjs(),
    )


def page_data(run: Run, clips: dict[str, str], num_runs: int, room: int = MAX_CLIP_BYTES) -> dict:
    """Return the data that the page draws of a run, thinned for long runs; adds videos to ``clips``."""
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
        "videos": compared_videos(run, clips, room),
        "weights": run.config.reward_weights,
        "moves": run.config.anchor_moves,
    }


def compared_videos(run: Run, clips: dict[str, str], room: int) -> list[dict]:
    """Return validation videos, smallest gain first; adds base64 ``clips`` by digest, at most ``room`` bytes."""
    numbers = sorted(run.after or run.before, key=lambda number: run.gains.get(number, 0.0))
    drawn = random.Random(0).sample(numbers, len(numbers))
    for number in dict.fromkeys([*numbers[:NUM_EXTREMES], *numbers[-NUM_EXTREMES:], *drawn]):
        entries = [scores[number] for scores in (run.before, run.after) if number in scores]
        room = _embed(entries, clips, room)
        if room < 0:
            break
    pairs = {number: {"before": run.before.get(number), "after": run.after.get(number)} for number in numbers}
    return [{"gain": run.gains.get(number), "drawn": drawn.index(number), **pairs[number]} for number in numbers]


def folder_videos(folders: list[Path], clips: dict[str, str], room: int) -> list[list[dict | None]]:
    """Return matching videos of several folders, a row each; adds base64 ``clips`` like `compared_videos`."""
    rows = match_videos(folders)
    for row in rows:
        room = _embed([video for video in row if video], clips, room)
        if room < 0:
            break
    return rows


def _embed(entries: list[dict], clips: dict[str, str], room: int) -> int:
    """Add the files of the entries to ``clips`` if ``room`` bytes suffice, and return the remaining room."""
    files = [(entry, Path(entry["file"]).read_bytes()) for entry in entries if entry["file"]]
    room -= sum(len(content) for _, content in files)
    for entry, content in files if room >= 0 else ():
        entry["clip"] = hashlib.blake2b(content, digest_size=8).hexdigest()
        clips[entry["clip"]] = base64.b64encode(content).decode()
    return room
