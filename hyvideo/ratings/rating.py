"""Rating page of a preference study, served over HTTP, and the database of answers."""

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse
from pydantic import BaseModel, ValidationError

from hyvideo.files.http_guard import read_body
from hyvideo.files.templates import fill
from hyvideo.files.text import quote

# in a study's folder
STUDY = "study.json"
KEY = "key.json"
VIDEOS = "videos"
DATABASE = "answers.sqlite"
SIDES = ("first", "second")
MAX_BODY = 10_000  # bytes of an answer
MAX_SECONDS = 20  # in which an answer must arrive
# Without a write-ahead log, SQLite rejects an answer if the file has been deleted or replaced since
# it was opened.
SCHEMA = """PRAGMA journal_mode = DELETE; PRAGMA synchronous = FULL; CREATE TABLE IF NOT EXISTS answers (rater TEXT,
    pair TEXT, dimension TEXT, answer TEXT, at TEXT DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (pair, dimension))"""


class Answers(BaseModel):
    """A rater's answers by pair and dimension, as the page sends them."""

    token: str
    answers: dict[str, dict[str, Literal["first", "second", "tie", "both_bad"]]]


class Study:
    """A study's raters by token, and its database of answers, which threads and processes can
    share.
    """

    def __init__(self, folder: Path):
        content = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        self.folder = folder
        self.questions: dict[str, str] = content["questions"]
        self.raters: dict[str, dict] = content["raters"]
        self._database = sqlite3.connect(folder / DATABASE, timeout=30, check_same_thread=False)
        self._database.row_factory = sqlite3.Row
        self._lock = threading.Lock()
        self._database.executescript(SCHEMA)

    def add(self, content: bytes) -> None:
        """Store `Answers` as JSON, except for pairs that already have one.

        Raises ValueError for invalid answers.
        """
        try:
            given = Answers.model_validate_json(content)
        except ValidationError as error:
            raise ValueError(
                "answers must have a token, pairs and an answer to each question"
            ) from error
        rater = self.raters.get(given.token, {"name": None, "pairs": ()})
        for pair, answers in given.answers.items():
            if pair not in rater["pairs"] or answers.keys() != self.questions.keys():
                raise ValueError(
                    "answers must belong to the rater's pairs and cover "
                    f"{', '.join(self.questions)}"
                )
        rows = [
            (rater["name"], pair, *each)
            for pair, answers in given.answers.items()
            for each in answers.items()
        ]
        with self._lock, self._database:
            insert = (
                "INSERT OR IGNORE INTO answers (rater, pair, dimension, answer) VALUES (?, ?, ?, ?)"
            )
            self._database.executemany(insert, rows)

    def rows(self) -> list[sqlite3.Row]:
        """Return all answers in order of arrival: rater, pair, dimension, answer, at (UTC)."""
        with self._lock:
            return self._database.execute("SELECT * FROM answers ORDER BY rowid").fetchall()

    def require_videos(self) -> None:
        """Raise ValueError if a video is missing or empty: raters would answer without seeing it."""
        for rater in self.raters.values():
            for pair in rater["pairs"].values():
                for side in SIDES:
                    video = self.folder / pair[side]
                    if not video.is_file() or not video.stat().st_size:
                        raise ValueError(
                            f"the study needs the video {quote(video)}, which is missing or empty; "
                            "restore it"
                        )

    def page(self, token: str) -> str:
        """Render the rater's page, at the first pair without an answer."""
        done = {row["pair"] for row in self.rows()}
        template = Path(__file__).with_name("page.html")
        return fill(template, study=self, token=token, done=done)


def create_app(study: Study, after_answer: Callable[[], object] | None = None) -> FastAPI:
    """Return the web service of a study. A token gives access to the pairs of its rater only.

    ``after_answer`` is called after answers are stored, perhaps in several threads.
    """

    def check(token: str = "", pair: str | None = None, side: str = "first") -> None:
        if (
            token not in study.raters
            or side not in SIDES
            or pair not in (None, *study.raters[token]["pairs"])
        ):
            raise HTTPException(404, "page not found; please check your link")

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(check)])

    @app.get("/{token}/")
    def show(token: str) -> HTMLResponse:
        return HTMLResponse(study.page(token), headers={"cache-control": "no-store"})

    @app.get("/{token}/clips/{pair}-{side}.mp4")
    def clip(token: str, pair: str, side: str) -> FileResponse:
        file = study.folder / study.raters[token]["pairs"][pair][side]
        if not file.is_file():
            raise HTTPException(
                404, "the clip is missing; please contact the person who invited you"
            )
        # By default the tag depends on the file, so that equal files could be recognized.
        headers = {"cache-control": "private, max-age=86400", "etag": f'"{pair}-{side}"'}
        return FileResponse(file, headers=headers)

    def store(content: bytes) -> None:
        study.add(content)
        if after_answer:
            after_answer()

    @app.post("/{token}/answers", status_code=204)
    async def add(request: Request) -> None:
        await store_answer(request, store)

    return app


async def store_answer(request: Request, store: Callable[[bytes], None]) -> None:
    """Give the body of a request to ``store``; a ValueError is the rater's mistake, and a full disk
    is not.
    """
    content = await read_body(request, max_bytes=MAX_BODY, seconds=MAX_SECONDS)
    try:
        await asyncio.to_thread(store, content)
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
    except (sqlite3.Error, OSError) as error:
        raise HTTPException(503, f"{error}; please contact the person who invited you") from error
