"""Tables that people bring: CSV, TSV, JSON and JSONL files, text files of prompts, and folders of
videos with their captions.
"""

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyvideo.files.files import find_path, folder_problem, read_text
from hyvideo.files.text import note, quote

# Other names of a column, from the data sets of other projects.
SYNONYMS = {
    "prompt": ("caption", "text", "prompt_en", "frame_caption"),
    "video": ("video_path", "file_name", "media_path", "file_path", "path"),
}
# Columns of other projects that may have the first frame or a picture to train on, and the last frame.
PICTURE_COLUMNS = (
    "image",
    "images",
    "image_path",
    "image_file",
    "input_image",
    "first_frame",
    "first_frame_path",
    "start_image",
    "cond_image",
    "ref_image",
    "reference_image",
)
LAST_PICTURE_COLUMNS = (
    "last_image",
    "last_image_path",
    "last_frame",
    "last_frame_path",
    "end_image",
    "end_image_path",
    "end_frame",
)
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
VIDEOS = (".mp4", ".mov", ".m4v", ".webm", ".mkv", ".avi")
# In a folder: the table of its videos, or the captions and the paths line by line (finetrainers).
METADATA = ("videos.csv", "metadata.csv", "metadata.jsonl", "metadata.json")
CAPTIONS = ("prompts.txt", "prompt.txt", "captions.txt", "caption.txt")
LISTED_VIDEOS = ("videos.txt", "video.txt")
# Files that are no tables, and what to give in their place.
OTHER_FILES = {
    ".parquet": "convert it with pandas: pandas.read_parquet(FILE).to_csv(FILE.csv)",
    ".xlsx": "save it as CSV",
    ".toml": "give the folder or the JSONL file that it names",
}
# Options in the sample prompts of kohya's and musubi's trainers.
_OPTION = re.compile(r"\s--[a-z]{1,3}\s+[\d.]+\b")


@dataclass(frozen=True)
class Table:
    """Rows of text cells, by the names of the columns as they are written."""

    path: Path  # file or folder, for messages
    folder: Path  # in which relative paths of its cells begin
    columns: list[str]
    rows: list[dict[str, str]]  # without blank ones; those that lack a cell lack its column

    def select(
        self, what: str, needed: Sequence[str], optional: Sequence[str] = ()
    ) -> list[dict[str, str]]:
        """Return the rows with the columns that are there, under their own names, and say which
        columns are not read.

        A column is found in any case, or under one of its ``SYNONYMS``; its missing cells are
        empty. Raises ValueError, naming the file, if a column is missing or occurs twice, and for
        one that is not read although it has pictures or the name of one that is, in another spelling.
        """
        names = [*needed, *optional]
        found: dict[str, str] = {}
        for name in names:
            same = [column for column in self.columns if column.casefold() == name.casefold()]
            others = [
                column for column in self.columns if column.casefold() in SYNONYMS.get(name, ())
            ]
            if len(same or others) > 1:
                raise ValueError(
                    f"{what} must have one column `{name}`, got {', '.join(same or others)} in "
                    f"{self.path}; keep one of them"
                )
            if same or others and name in needed:
                found[name] = (same or others)[0]
        missing = [name for name in needed if name not in found]
        if missing and self.rows:
            got = quote(", ".join(self.columns), 300)[1:-1] or "no columns"
            raise ValueError(
                f"{what} needs the columns {', '.join(f'`{name}`' for name in needed)}; "
                f"{self.path} lacks {', '.join(missing)}, got {got}"
            )
        self._check_unread(
            [column for column in self.columns if column not in found.values()],
            absent=[name for name in names if name not in found],
        )
        return [{name: row.get(column, "") for name, column in found.items()} for row in self.rows]

    def _check_unread(self, unread: Sequence[str], absent: Sequence[str]) -> None:
        for column in unread:
            near = [name for name in absent if _letters(name) == _letters(column)]
            picture = "ref_image_path"
            if column.casefold() in LAST_PICTURE_COLUMNS:
                picture = "ref_last_image_path"
            named = column.casefold() in (*PICTURE_COLUMNS, *LAST_PICTURE_COLUMNS)
            if self._has_pictures(column) or (named and picture in absent):
                near = [picture] if picture in absent else []
                if not near:
                    raise ValueError(
                        f"the column `{column}` of {self.path} has pictures, which are not read; "
                        "remove it if they do not matter"
                    )
            if near:
                raise ValueError(
                    f"the column `{column}` of {self.path} is not read; rename it to `{near[0]}` "
                    "if it is that, or remove it"
                )
        if unread:
            columns = quote(", ".join(unread), 300)[1:-1]
            note(f"{self.path}: {len(self.rows)} rows; columns that are not read: {columns}")

    def _has_pictures(self, column: str) -> bool:
        """Return whether the first cell of a column that looks like a picture is one."""
        cells = (row.get(column, "").strip() for row in self.rows)
        first = next((cell for cell in cells if cell.casefold().endswith(PICTURES)), None)
        return first is not None and find_file(self.folder, first) is not None


def _letters(name: str) -> str:
    """Return the letters of a column's name, without those that people vary: ``Seeds`` is `seed`."""
    return re.sub(r"[\W_]", "", name.casefold()).removesuffix("s")


def read_table(path: str | Path, what: str) -> Table:
    """Read a table: a CSV, TSV, JSON or JSONL file, a text file with a prompt in each line, or a
    folder of videos.

    A folder has videos.csv, metadata.csv or metadata.jsonl, or prompts.txt and videos.txt, or a
    text file beside each video. Raises ValueError, naming the file, for anything else; ``what``
    names the kind of file.
    """
    path = find_path(path)
    try:
        if os.path.isdir(path):
            return _read_folder(path)
        suffix = path.suffix.casefold()
        if suffix in OTHER_FILES:
            raise ValueError(f"{path} is not read; {OTHER_FILES[suffix]}")
        rows = _rows_of(read_text(path), suffix, path)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    return _table(path, path.parent, rows)


def _table(path: Path, folder: Path, rows: Iterable[dict[str, str]]) -> Table:
    # spreadsheets may end a table with rows of commas only
    rows = [row for row in rows if any(cell.strip() for cell in row.values())]
    return Table(path, folder, list(dict.fromkeys(name for row in rows for name in row)), rows)


def _rows_of(text: str, suffix: str, path: Path) -> list[dict[str, str]]:
    if suffix == ".json":
        return _json_rows([text], path)
    if suffix in (".jsonl", ".ndjson"):
        return _json_rows([line for line in text.split("\n") if line.strip()], path)
    header = text.lstrip("\n").partition("\n")[0]
    cells = {
        mark: [cell.strip(' "\r').casefold() for cell in header.split(mark)] for mark in ",;\t"
    }
    if suffix == ".txt" and not any("prompt" in names for names in cells.values()):
        return [{"prompt": line} for line in _lines(text, path)]
    known = {"prompt", *SYNONYMS["prompt"]}
    # spreadsheets of many countries separate columns with semicolons
    mark = max(cells, key=lambda mark: len(known.intersection(cells[mark])))
    return _csv_rows(text, "\t" if suffix == ".tsv" else mark, path)


def _lines(text: str, path: Path) -> list[str]:
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    options = [match[0].strip() for match in map(_OPTION.search, lines) if match]
    if options:
        note(
            f"{path}: options such as {quote(options[0])} in {len(options)} of {len(lines)} lines "
            "are read as words of the prompt"
        )
    return lines


def _json_rows(texts: Sequence[str], path: Path) -> list[dict[str, str]]:
    """Return the objects of a JSON list, or of JSON texts, as rows. A text alone is a prompt."""
    values = []
    for number, text in enumerate(texts, start=1):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON (text {number}: {error})") from error
        values += value if isinstance(value, list) else [value]
    rows = [{"prompt": value} if isinstance(value, str) else value for value in values]
    wrong = [row for row in rows if not isinstance(row, dict)]
    if wrong:
        raise ValueError(f"{path} must be a list of objects, got {quote(wrong[0], 60)}")
    return [{name: _cell(value) for name, value in row.items()} for row in rows]


def _cell(value: object) -> str:
    """Return a JSON value as the text of a cell."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _csv_rows(text: str, mark: str, path: Path) -> list[dict[str, str]]:
    # without strict, an unclosed quote includes the next rows in its cell
    reader = csv.reader(io.StringIO(text), delimiter=mark, strict=True)
    try:
        lines = [line for line in reader if line]
    except csv.Error as error:
        raise ValueError(
            f"{quote(path)} must be UTF-8 text in CSV form ({error}, line {reader.line_num}; put a "
            "cell that contains a comma, a line break or quotes in double quotes, and double the "
            "quotes in it)"
        ) from error
    header = [name.strip() for name in lines[0]] if lines else []
    repeated = sorted({name for name in header if header.count(name) > 1 and name})
    if repeated:
        raise ValueError(f"each column must occur once, got {', '.join(repeated)} twice in {path}")
    for number, line in enumerate(lines[1:], start=1):
        if len(line) > len(header):
            raise ValueError(
                f"row {number} of {path} has more cells than columns; put a cell that contains a "
                f"comma in double quotes: {quote(mark.join(line))}"
            )
    return [dict(zip(header, [*line, *[""] * len(header)])) for line in lines[1:]]


def _read_folder(folder: Path) -> Table:
    """Read the table of a folder, or the captions beside its videos."""
    for name in METADATA:
        if (folder / name).is_file():
            rows = _rows_of(read_text(folder / name), Path(name).suffix, folder / name)
            return _table(folder / name, folder, rows)
    captions = next((folder / name for name in CAPTIONS if (folder / name).is_file()), None)
    listed = next((folder / name for name in LISTED_VIDEOS if (folder / name).is_file()), None)
    if captions:
        prompts = _lines(read_text(captions), captions)
        if not listed:
            return _table(captions, folder, [{"prompt": prompt} for prompt in prompts])
        videos = _lines(read_text(listed), listed)
        if len(prompts) != len(videos):
            raise ValueError(
                f"{captions} and {listed} must have equally many lines, got {len(prompts)} and "
                f"{len(videos)}"
            )
        rows = [{"prompt": prompt, "video": video} for prompt, video in zip(prompts, videos)]
        return _table(captions, folder, rows)
    if not has_captions(folder):
        raise ValueError(
            f"a folder must have {', '.join(METADATA)}, {CAPTIONS[0]} and {LISTED_VIDEOS[0]}, or a "
            f"text file beside each video, got {folder} without them"
        )
    rows = [
        {"prompt": read_text(video.with_suffix(".txt")).strip(), "video": video.name}
        for video in videos_in(folder)
    ]
    return _table(folder, folder, rows)


def has_captions(folder: Path) -> bool:
    """Return whether `read_table` can read the prompts of the videos in a folder."""
    named = any((folder / name).is_file() for name in (*METADATA, *CAPTIONS))
    return named or any(path.with_suffix(".txt").is_file() for path in videos_in(folder))


def videos_in(folder: Path) -> list[Path]:
    """Return the videos in a folder, in the order of their names and of the numbers in them."""
    if folder_problem(folder):
        return []
    return sorted(
        (path for path in folder.iterdir() if is_video(path)),
        key=lambda path: in_order(path.name),
    )


def is_video(path: Path) -> bool:
    """Return whether a file has the name of a video; hidden files have not."""
    return path.suffix.casefold() in VIDEOS and not path.name.startswith(".")


def in_order(name: str) -> list[str | int]:
    """Return a key that sorts names with numbers by the numbers: 2.mp4 before 10.mp4."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def find_file(folder: Path, name: str) -> Path | None:
    """Return the file that a cell names, relative to the folder of its table or to the working
    directory, perhaps written on Windows; None if there is none.
    """
    for path in (folder / name, Path(name), folder / name.replace("\\", "/")):
        if name and os.path.isfile(path):  # Path.is_file raises for a name that is too long
            return path
    return None


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return file.getvalue()
