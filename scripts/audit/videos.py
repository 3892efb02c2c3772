"""Given videos: which of them an iteration trains on, from the CSV files and audit.jsonl."""

import json
import math
from collections import defaultdict
from pathlib import Path

from scripts.audit import chance
from scripts.audit.rewards import groups
from scripts.audit.run import Run, read_table
from scripts.audit.statements import Audit, CannotCheck

TOPIC = "Given videos"
HELD_OUT = 0.15  # of the prompts of rated pairs
YES = {"1", "1.0", "true", "yes", "keep", "y", "t"}


def audit_videos(run: Run, audit: Audit) -> None:
    if not run.trains_given_videos:
        return
    text = "an iteration has the videos whose turn it is, by the order of the seed"
    setting = "videos_csv" if run.objective == "sft" else "pairs_csv"
    with audit.compare(TOPIC, text, f"audit.jsonl, {setting}") as rows:
        examples = kept_videos(run) if run.objective == "sft" else preferences(run)
        for line in run.lines:
            found = groups(line)
            places = chance.turns(len(examples), len(found), line["iteration"], run.get("seed", 42))
            for number, (place, group) in enumerate(zip(places, found)):
                videos = examples[place]
                for entry in group:
                    where = f"iteration {line['iteration']}, group {number}"
                    expected = videos[entry["member"] % len(videos)]
                    found = Path(entry["video"])
                    if is_same(expected, found):
                        found = expected
                    rows.equal(where, str(expected), str(found))


def is_same(expected: Path, found: Path) -> bool:
    """Return whether two paths are those of one file, also where the folder has another name now:
    then the last two parts of both are the same.
    """
    if expected.resolve() == found.resolve():
        return True
    return not found.exists() and expected.parts[-2:] == found.parts[-2:]


def _file(folder: Path, name: str) -> Path:
    """Return the file that a cell names, relative to the folder of its table or to where the run
    was started.
    """
    given = Path(name)
    return given if given.exists() and not (folder / name).exists() else folder / name


def kept_videos(run: Run) -> list[tuple[Path]]:
    """Return the videos that are trained on: those with `keep`, and of each prompt the best
    ``keep_fraction`` by score.
    """
    rows = []
    for path in run.paths("videos_csv"):
        path = path / "videos.csv" if path.is_dir() else path
        for row in read_table(path, "prompt", "video"):
            if row.get("keep", "1").strip().casefold() in YES:
                rows.append((row, _file(path.parent, row["video"].strip())))
    fraction = run.get("keep_fraction", 1.0)
    kept = set(range(len(rows)))
    if fraction < 1:
        kept = set()
        by_prompt = defaultdict(list)
        for place, (row, _) in enumerate(rows):
            columns = ("prompt", "ref_image_path", "ref_last_image_path")
            key = tuple(row.get(column, "").strip() for column in columns)
            by_prompt[key].append(place)
        for places in by_prompt.values():
            best = sorted(places, key=lambda place: -float(rows[place][0]["score"]))
            kept.update(best[: math.ceil(round(fraction * len(best), 9))])
    return [(video,) for place, (_, video) in enumerate(rows) if place in kept]


def preferences(run: Run) -> list[tuple[Path, Path]]:
    """Return the rated pairs that are trained on, the preferred video first: those without a tie, of
    the prompts that are not held out.
    """
    weights = run.get("pair_weights") or {}
    weights = json.loads(weights) if isinstance(weights, str) else weights
    pairs = []
    for path in run.paths("pairs_csv"):
        path = path / "pairs.csv" if path.is_dir() else path
        for row in read_table(path, "prompt", "first", "second", "answer"):
            answer = row["answer"].strip().casefold()
            if weights and not weights.get(row.get("dimension", "").strip(), 0):
                continue
            if answer in ("tie", "both_bad"):
                continue
            if answer not in ("first", "second"):
                raise CannotCheck(f"the audit does not know the answer {answer!r}")
            first, second = (_file(path.parent, row[name].strip()) for name in ("first", "second"))
            videos = (first, second) if answer == "first" else (second, first)
            pairs.append((row["prompt"].strip(), videos))
    prompts = sorted({prompt for prompt, _ in pairs})
    count = min(len(prompts) - 1, max(1, round(HELD_OUT * len(prompts))))
    order = chance.order(len(prompts), run.get("seed", 42), "held-out pairs")
    held_out = {prompts[place] for place in order[:count]}
    return [videos for prompt, videos in pairs if prompt not in held_out]
