"""Page of the videos that generate.py wrote into a folder, perhaps beside those of other
folders.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote as quote_url

from hyvideo.files.files import folder_problem
from hyvideo.files.templates import fill
from hyvideo.files.text import quote
from hyvideo.records.run_files import write_text

PAGE_FILE = "index.html"
APART = (
    "prompt",
    "image",
    "seed",
    "number",
    "file",
    "ranking",
)  # shown with a video; the other settings are in a table


def write_gallery(*folders: Path) -> Path:
    """Write index.html of folders side by side into the first, with relative links; return its
    path.

    It shows every mp4 file with a JSON file of its settings.
    """
    page = folders[0] / PAGE_FILE
    rows = match_videos(folders)
    columns = [[video for video in column if video] for column in zip(*rows)]
    settings = {}  # values of each setting, by folder
    for name in dict.fromkeys(chain(*chain(*columns))):
        if name not in APART:
            values = [[video.get(name, "–") for video in column] for column in columns]
            settings[name] = [list(dict.fromkeys(of_folder)) for of_folder in values]
    links = {
        video["file"]: quote_url(os.path.relpath(video["file"], folders[0]))
        for video in chain(*columns)
    }
    names = short_names([place.resolve() for place in folders])
    template = Path(__file__).with_name("gallery.html.j2")
    write_text(page, fill(template, names=names, rows=rows, settings=settings, links=links))
    return page


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest end of each path that no other path has."""
    ends = [
        ["/".join(path.parts[-count:]) for count in range(1, 1 + len(path.parts))]
        for path in folders
    ]
    counts = Counter(chain(*ends))
    return [next((end for end in each if counts[end] == 1), each[-1]) for each in ends]


def match_videos(folders: Sequence[Path]) -> list[list[dict | None]]:
    """Return videos of equal prompt, image and seed side by side, the first with the first; None if
    there is none.
    """
    rows: dict[tuple, list[dict | None]] = {}
    for column, place in enumerate(folders):
        counts: Counter = Counter()
        for video in find_videos(place):
            key = video["prompt"], video.get("image"), video.get("seed")
            counts[key] += 1
            rows.setdefault((*key, counts[key]), [None] * len(folders))[column] = video
        if not counts:
            problem = folder_problem(place) or "it has no mp4 file with its JSON file"
            raise ValueError(
                f"a folder must have videos of generate.py, got {quote(place)}: {problem}"
            )
    return list(rows.values())


def find_videos(folder: Path) -> Iterator[dict[str, str]]:
    """Yield path and settings of each video as text; skip videos without readable settings."""
    for file in sorted(folder.glob("*.mp4")):
        with suppress(OSError, ValueError, LookupError, TypeError):
            settings = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
            if isinstance(settings, dict) and isinstance(settings.get("prompt"), str):
                settings.pop("settings_hash", None)  # for the program alone
                choice = settings.pop("best_of", None)
                texts = {}
                for name, value in settings.items():
                    texts[name] = "–" if value in (None, "") else str(value)
                if choice:
                    texts["best_of"] = str(choice["candidates"])
                    texts["ranking"] = ranking(choice)
                yield texts | {"file": str(file)}


def ranking(record: dict[str, Any]) -> str:
    """Return the rewards of all candidates in one line, from the best."""
    totals = [entry["reward"] for entry in record["rewards"]]
    ranked = sorted((total for total in totals if total is not None), reverse=True)
    missing = len(totals) - len(ranked)
    text = f"best of {record['candidates']}: {', '.join(f'{total:.3f}' for total in ranked)}"
    return f"{text}, {missing} without a reward" if missing else text
