"""The report as one self-contained HTML file: Jinja templates, Plotly's script, the data and the
videos.
"""

import base64
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from urllib.parse import quote as quote_url
from urllib.parse import unquote

from jinja2.utils import htmlsafe_json_dumps

from hyvideo.files.templates import fill
from hyvideo.records.run_files import evenly_spaced, write_text
from hyvideo.report.clips import MAX_CLIP_BYTES, Clips, Row, alternate, embed
from hyvideo.report.comparison import (
    Comparison,
    differing_settings,
    read_comparison,
    reward_of,
    setting_text,
    shown_settings,
    with_runs_below,
)
from hyvideo.report.contents import MAX_POINTS, RunContents
from hyvideo.report.gallery import match_videos
from hyvideo.report.plots import BY_STEP, plots_of
from hyvideo.settings.config import SHARED, Config
from hyvideo.settings.reward_settings import reward_weights

REPORT_FILE = "report.html"
PLOTLY = Path(__file__).parent / "plotly" / "plotly-cartesian.min.js.gz"
MAX_PAGE_BYTES = 10_000_000
MARKUP_BYTES = 700_000  # of a page, for everything but Plotly, data and videos
MIN_POINTS = 100  # of a curve, however many runs there are
MAX_POINTS_OF_ALL = 5_000  # points of a metric, in all runs
MIN_VALIDATIONS = 50  # points of a curve over validations, however many runs there are
NUM_EXTREMES = 4  # worst and best videos that are each included before a random sample
MAX_DETAILED_RUNS = 8  # with more runs, the page lists only the videos that it shows
NUM_NAMED = 4  # folders that a sentence names
SHOWN = ("prompt", "image", "seed", "file")  # entries of a generated video
NO_SCORES = ("number", "seed", "iteration", "group", "member", "reward", "advantage", "Overall")


def write_report(folders: Iterable[Path], out: Path) -> None:
    """Write the page of the folders, or of the runs below them, at most 10 MB.

    Raises ValueError for a folder of no kind.

    Large videos are shown as previews, with a link to the file relative to ``out``.
    """
    places = with_runs_below(folder.resolve() for folder in folders)
    found = read_comparison(places, points_each(len(places)))
    write_text(out, report_page(found, out.resolve().parent))


def points_each(num_runs: int) -> int:
    """Return how many points a curve of a run has in a page of several runs."""
    return max(MIN_POINTS, min(MAX_POINTS, MAX_POINTS_OF_ALL // max(1, num_runs)))


def report_page(found: Comparison, place: Path) -> str:
    """Return the text of a page in the folder ``place``, with everything embedded."""
    rows = match_videos(list(found.videos.values()))
    data = comparison_data(found)
    room = MAX_PAGE_BYTES - MARKUP_BYTES - len(packed_plotly()) - len(as_script(data))
    files = alternate(compared_files(found.runs.values()), map(_files, rows))
    clips = embed(files, min(MAX_CLIP_BYTES, 3 * room // 4))
    videos = {name: compared_videos(run, clips, place) for name, run in found.runs.items()}
    note = videos_note(videos)
    for name, each in videos.items():
        if len(videos) > MAX_DETAILED_RUNS:
            each = [video for video in each if has_clip(video)]
        data["runs"][name]["videos"] = each
    data["folders"] = list(found.videos)
    data["rows"] = folder_videos(rows, clips, place)
    data["clips"] = clips.contents
    data["posters"] = clips.posters
    data["originals"] = clips.originals
    return fill(
        Path(__file__).with_name("page.html.j2"),
        found=found,
        runs=found.runs,
        data=data,
        script=as_script(data),
        defaults_of=defaults_of,
        eta_of=eta_of,
        shown_settings=shown_settings,
        plotly=packed_plotly(),
        num_matched=len(rows),
        videos_note=note,
    )


def eta_of(config: Config) -> str:
    """Return the eta of a run; if it has the noise of a sampler, that one and the number, unless the
    file of a sampler has moved.
    """
    eta = config.rollout.eta
    if not isinstance(eta, str):
        return f"{eta}"
    try:
        return f"{config.eta:.4g}, which has the noise of {eta}"
    except ValueError:
        return f"with the noise of {eta}"


def defaults_of(config: Config) -> dict[str, object]:
    """Return the values of all settings if only the version and the objective of a run are given, on
    a device of the same kind.
    """
    of_version = Config.of_version(config.model.transformer_version)
    resolved = of_version.resolve_auto(on_gpu=config.model.device != "cpu").flat()
    defaults = dict(config.defaults)
    # ``auto`` stands for a value that depends on the device
    for name in defaults:
        if name in SHARED:
            defaults[name] = resolved[name]
    if config.objective.group_size:
        defaults["num_generations"] = config.objective.group_size
    return defaults


def as_script(data: dict) -> str:
    """Return data as JSON for a script element; no text in it can end the element."""
    return htmlsafe_json_dumps(data, separators=(",", ":"))


@cache
def packed_plotly() -> str:
    """Return the script of Plotly's cartesian plots, compressed, in base64; the page unpacks it.

    It is 0.7 MB instead of 1.5.
    """
    return base64.b64encode(PLOTLY.read_bytes()).decode()


# --- data of the runs -----------------------------------------------------------------------------


def comparison_data(found: Comparison) -> dict:
    """Return the data that the page draws, except videos."""
    configs = {name: run.config for name, run in found.runs.items()}
    settings = differing_settings(configs)
    max_validations = max(MIN_VALIDATIONS, points_each(len(configs)) // 2)
    runs = {}
    for name, run in found.runs.items():
        values = shown_settings(configs[name])
        runs[name] = page_data(run, max_validations)
        runs[name]["settings"] = {
            setting: setting_text(values.get(setting)) for setting in settings
        }
    names = chain.from_iterable((*run["metrics"], *run["columns"]) for run in runs.values())
    return {
        "runs": runs,
        "plots": plots_of(names),
        "scores": found.scores,
        "settings": settings,
    }


def page_data(run: RunContents, max_validations: int) -> dict:
    """Return the data that the page draws of a run, except its videos, with at most so many of its
    validations.
    """
    return curves_of(run) | validations_of(run, max_validations) | verdict_of(run) | costs_of(run)


def curves_of(run: RunContents) -> dict:
    """Return the metrics of the iterations, and what the page needs to draw them."""
    drawn = ("iteration", BY_STEP)  # lists of other names are in metrics.jsonl only
    columns = run.series.columns
    return {
        "metrics": run.series.points,
        "columns": {name: rows for name, rows in columns.items() if name.startswith(drawn)},
        "timeline": run.timeline,
    }


def validations_of(run: RunContents, at_most: int) -> dict:
    """Return the means and shifts of evenly spaced validations, the last one included."""
    rows = []
    if run.history:
        last = len(run.history) - 1
        rows = [*evenly_spaced(at_most - 1, last), last]
    shifts = [
        {shift.name: shift.shift / shift.allowed for shift in run.shifts[row]} for row in rows
    ]
    return {
        "validations": {
            "iteration": [run.history[row].iteration for row in rows],
            "means": by_name([run.history[row].means for row in rows]),
            "shifts": by_name(shifts),
        }
    }


def verdict_of(run: RunContents) -> dict:
    """Return the reward before and after training, and what may spoil the result."""
    before = after = gain = None
    if run.base:
        before = run.base.means.get("reward")
    if run.history:
        after = run.history[-1].means.get("reward")
    if run.gain:
        gain = run.gain.as_json()
    return {
        "reward": reward_of(run.config.reward),
        "weights": reward_weights(run.config.reward),
        "verdict": run.verdict,
        "before": before,
        "after": after,
        "gain": gain,
        "missing": run.series.total("reward/missing"),
        "skipped": run.series.total("update/skipped"),
    }


def costs_of(run: RunContents) -> dict:
    """Return how far the run is, and what it has cost."""
    series = run.series
    memory = forwards = checkpoint = None
    if "memory/peak_gib" in series.totals:
        memory = series.totals["memory/peak_gib"].largest
    if "cost/forwards" in series.totals:
        forwards = series.totals["cost/forwards"].mean
    if run.checkpoints:
        checkpoint = run.checkpoints[-1]
    return {
        "rollouts": run.rollouts_per_iteration,
        "iterations": run.last_iteration,
        "maxSteps": run.config.optimizer.max_steps,
        "processes": run.environment["processes"],
        "seconds": series.seconds,
        "restarts": len(series.restarts),
        "memory": memory,
        "forwards": forwards,
        "checkpoint": checkpoint,
    }


def by_name(rows: Iterable[Mapping[str, float | None]]) -> dict[str, list[float | None]]:
    """Return the values of each name in all rows, with few digits; None where a row does not have
    it.
    """
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_short(row.get(name)) for row in rows] for name in names}


def _short(value: float | None) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, int | float) else None


# --- videos ---------------------------------------------------------------------------------------


def compared_files(runs: Iterable[RunContents]) -> Iterator[Row]:
    """Yield the files of each validation video, before and after training in all runs, those to
    show first at first.

    The first are those with the smallest and the largest mean gain, the others are in random order.
    """
    pairs: dict[tuple, list[Row]] = {}  # files before and after training, by video, one row per run
    gains: dict[tuple, list[float]] = {}
    for run in runs:
        for number, entry in {**run.before, **run.after}.items():
            both = _files([run.before.get(number), run.after.get(number)])
            pairs.setdefault(_key(entry), []).append(both)
            gains.setdefault(_key(entry), []).append(run.gains.get(number, 0.0))
    by_gain = sorted(pairs, key=lambda key: fmean(gains[key]))
    drawn = random.Random(0).sample(list(pairs), len(pairs))
    for key in dict.fromkeys([*by_gain[:NUM_EXTREMES], *by_gain[-NUM_EXTREMES:], *drawn]):
        if len(pairs[key]) > MAX_DETAILED_RUNS:  # all runs would not fit
            yield from pairs[key]
        else:
            yield list(chain(*pairs[key]))


def compared_videos(run: RunContents, clips: Clips, place: Path) -> list[dict]:
    """Return the validation videos with their entries before and after training, smallest gain
    first.
    """
    newest = run.after or run.before
    numbers = sorted(newest)
    order = random.Random(0).sample(numbers, len(numbers))
    drawn = {number: rank for rank, number in enumerate(order)}
    return [
        {
            "prompt": newest[number]["prompt"],
            "seed": newest[number]["seed"],
            "number": number,
            "gain": run.gains.get(number),
            "drawn": drawn[number],
            "before": _on_page(run.before.get(number), clips, place),
            "after": _on_page(run.after.get(number), clips, place),
        }
        for number in sorted(numbers, key=lambda number: run.gains.get(number, 0.0))
    ]


def has_clip(video: Mapping) -> bool:
    """Return whether the page has the video before or after training."""
    return any(entry and "clip" in entry for entry in (video["before"], video["after"]))


def folder_videos(
    rows: list[list[dict | None]], clips: Clips, place: Path
) -> list[list[dict | None]]:
    """Return the rows of matching videos of several folders that have an embedded video."""
    shown = [row for row in rows if any(file in clips.digests for file in _files(row))]
    return [[_folder_video(video, clips, place) for video in row] for row in shown]


def _folder_video(video: dict | None, clips: Clips, place: Path) -> dict | None:
    if not video:
        return None
    return {name: video.get(name) for name in SHOWN} | _place_of(video["file"], clips, place)


def videos_note(videos: Mapping[str, list[dict]]) -> str:
    """Return how many of the validation videos are saved and shown, as a sentence; ``videos`` are
    those of each run.
    """
    by_key: dict[tuple, list[dict]] = {}  # in all runs
    for video in chain(*videos.values()):
        by_key.setdefault(_key(video), []).append(video)
    saved: dict[tuple, list[str]] = {}
    for key, each in by_key.items():
        entries = chain.from_iterable((video["before"], video["after"]) for video in each)
        files = [entry["file"] for entry in entries if entry and entry["file"]]
        if files:
            saved[key] = files
    shown = [key for key in saved if any(map(has_clip, by_key[key]))]
    if not saved:
        return "No videos are saved; log_num_videos sets how many a validation saves."
    places = list(dict.fromkeys(os.path.dirname(file) for file in chain(*saved.values())))
    named = ", ".join(map(unquote, places[:NUM_NAMED]))
    if len(places) > NUM_NAMED:
        named += ", ..."
    where = f"{len(saved)} of {len(by_key)} validation videos are saved in {named}"
    if not shown:
        return (
            f"{where}, but none of them can be shown: they cannot be read or are too large for "
            "this page."
        )
    if len(shown) < len(saved):
        return f"{where}; this page shows the {len(shown)} of them that fit."
    return (
        f"{len(shown)} of {len(by_key)} validation videos are shown (log_num_videos), selected "
        "before scoring."
    )


def _key(entry: Mapping) -> tuple:
    """Return what the entries of a video have in common, in all validations and runs."""
    return entry["prompt"], entry["seed"], entry["number"]


def _files(entries: Iterable[dict | None]) -> Row:
    return [Path(entry["file"]) for entry in entries if entry and entry["file"]]


def _on_page(entry: dict | None, clips: Clips, place: Path) -> dict | None:
    """Return the reward and the scores of a video, and where the page has it."""
    if entry is None:
        return None
    scores = {
        name: _short(value)
        for name, value in entry.items()
        if name not in NO_SCORES and isinstance(value, int | float) and not isinstance(value, bool)
    }
    where = _place_of(entry["file"], clips, place)
    return {"reward": _short(entry["reward"]), "scores": scores} | where


def _place_of(file: str | None, clips: Clips, place: Path) -> dict[str, str | None]:
    """Return a link to a video as ``file``, relative to ``place``, and its digest as ``clip`` if
    the page shows it.
    """
    if not file:
        return {"file": None}
    found: dict[str, str | None] = {"file": quote_url(os.path.relpath(file, place))}
    if Path(file) in clips.digests:
        found["clip"] = clips.digests[Path(file)]
    return found
