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
from hyvideo.evaluation.report.contents import Run, read_run
from hyvideo.records.run_files import evenly_spaced, write_text

REPORT_FILE = "report.html"
MAX_POINTS = 1500  # iterations in the curves of all runs
MAX_CLIP_BYTES = 5_500_000  # of all runs; base64 adds a third
NUM_EXTREMES = 4  # worst and best videos that are each included before a random sample


def write_report(folders: Iterable[Path], out: Path) -> None:
    """Write the page of one or several runs, at most 15 MB. Raises ValueError for no run or corrupted records."""
    places = [folder.resolve() for folder in folders]
    try:
        page = _page(places)
    except (LookupError, TypeError, AttributeError, TemplateError) as error:
        raise ValueError(f"{', '.join(map(str, places))}: the records of a run are corrupted: {error!r}") from error
    write_text(out, page)


def _page(places: list[Path]) -> str:
    from plotly.offline import get_plotlyjs  # only reports need it

    are_unique = len({place.name for place in places}) == len(places)
    runs = {place.name if are_unique else str(place): read_run(place) for place in places}
    clips: dict[str, str] = {}
    data = {"runs": {name: page_data(run, clips, len(runs)) for name, run in runs.items()}, "clips": clips}
    template = Path(__file__).with_name("page.html.j2")
    return fill(template, runs=runs, data=data, default=Config(), plotly=get_plotlyjs())


def page_data(run: Run, clips: dict[str, str], num_runs: int) -> dict:
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
        "videos": compared_videos(run, clips, MAX_CLIP_BYTES // num_runs),
    }


def compared_videos(run: Run, clips: dict[str, str], room: int) -> list[dict]:
    """Return validation videos, smallest gain first; adds base64 ``clips`` by digest, at most ``room`` bytes."""
    numbers = sorted(run.after or run.before, key=lambda number: run.gains.get(number, 0.0))
    drawn = random.Random(0).sample(numbers, len(numbers))
    for number in dict.fromkeys([*numbers[:NUM_EXTREMES], *numbers[-NUM_EXTREMES:], *drawn]):
        entries = [scores[number] for scores in (run.before, run.after) if number in scores]
        files = [(entry, Path(entry["file"]).read_bytes()) for entry in entries if entry["file"]]
        room -= sum(len(content) for _, content in files)
        if room < 0:
            break
        for entry, content in files:
            entry["clip"] = hashlib.blake2b(content, digest_size=8).hexdigest()
            clips[entry["clip"]] = base64.b64encode(content).decode()
    pairs = {number: {"before": run.before.get(number), "after": run.after.get(number)} for number in numbers}
    return [{"gain": run.gains.get(number), "drawn": drawn.index(number), **pairs[number]} for number in numbers]
