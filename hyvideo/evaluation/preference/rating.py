"""Raters' side of a study: their page, over HTTP or as files, and a database of their answers."""

import asyncio
import shutil
import sqlite3
import threading
from pathlib import Path
from typing import Literal

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from hyvideo.data.outside import make_folder, parse_json
from hyvideo.data.templates import fill

STUDY, KEY, VIDEOS, DATABASE = "study.json", "key.json", "videos", "answers.sqlite"  # in a study's folder
SIDES = ("first", "second")
MAX_BODY, MAX_SECONDS = 10_000, 20  # bytes of an answer, and what they may take
SCHEMA = """PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; CREATE TABLE IF NOT EXISTS answers (rater TEXT,
    pair TEXT, dimension TEXT, answer TEXT, at TEXT DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (pair, dimension))"""


class Answers(BaseModel):
    """A rater's answers by pair and dimension, as JSON: of one pair as the page sends, or of all as it saves."""

    token: str
    answers: dict[str, dict[str, Literal["first", "second", "tie", "both_bad"]]]


class Study:
    """A study's raters by token, and its database, which any number of threads and processes may use."""

    def __init__(self, folder: Path):
        try:
            content = parse_json((folder / STUDY).read_text(encoding="utf-8"))
            self.folder, self.questions, self.raters = folder, dict(content["questions"]), content["raters"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / STUDY} must be as `make` writes it, with other questions: {error}") from error
        self._database = sqlite3.connect(folder / DATABASE, timeout=30, check_same_thread=False)
        self._database.row_factory, self._lock = sqlite3.Row, threading.Lock()
        self._database.executescript(SCHEMA)

    def add(self, content: bytes) -> None:
        """Commits `Answers`, but of pairs that have one already. Raises ValueError for any that cannot be."""
        given = Answers.model_validate_json(content)
        rater = self.raters.get(given.token, {"name": None, "pairs": ()})
        for pair, answers in given.answers.items():
            if pair not in rater["pairs"] or answers.keys() != self.questions.keys():
                raise ValueError(f"an answer is of a rater's own pair, and to each of {', '.join(self.questions)}")
        rows = [(rater["name"], pair, *each) for pair, answers in given.answers.items() for each in answers.items()]
        with self._lock, self._database:
            insert = "INSERT OR IGNORE INTO answers (rater, pair, dimension, answer) VALUES (?, ?, ?, ?)"
            self._database.executemany(insert, rows)

    def rows(self) -> list[sqlite3.Row]:
        """All answers in their order: rater, pair, dimension, answer, at (when it came, UTC)."""
        with self._lock:
            return self._database.execute("SELECT * FROM answers ORDER BY rowid").fetchall()

    def page(self, token: str, *, is_alone: bool = False) -> str:
        """The rater's page, at the first pair without an answer. One that ``is_alone`` needs no server."""
        done = {row["pair"] for row in self.rows()}
        return fill(Path(__file__).with_name("page.html"), study=self, token=token, done=done, is_alone=is_alone)

    def write_pages(self, out: Path) -> None:
        """Writes a folder for each rater, whose index.html needs no server."""
        for token, rater in self.raters.items():
            clips = out / rater["name"] / "clips"
            make_folder(clips)
            for name, pair in rater["pairs"].items():
                for side in SIDES:
                    shutil.copy2(self.folder / pair[side], clips / f"{name}-{side}.mp4")
            clips.with_name("index.html").write_text(self.page(token, is_alone=True), encoding="utf-8")


def create_app(study: Study) -> FastAPI:
    """The service of a study. Who has no token of it learns nothing; who has one sees the rater's own pairs alone."""

    def check(token: str = "", pair: str | None = None, side: str = "first") -> None:
        if token not in study.raters or side not in SIDES or pair not in (None, *study.raters[token]["pairs"]):
            raise HTTPException(404, "there is nothing here; ask for your link again")

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(check)])

    @app.get("/{token}/")
    def show(token: str) -> HTMLResponse:
        return HTMLResponse(study.page(token), headers={"cache-control": "no-store"})

    @app.get("/{token}/clips/{pair}-{side}.mp4")
    def clip(token: str, pair: str, side: str) -> FileResponse:
        file = study.folder / study.raters[token]["pairs"][pair][side]
        return FileResponse(file, headers={"cache-control": "private, max-age=86400"})

    @app.post("/{token}/answers", status_code=204)
    async def add(request: Request) -> None:
        try:
            if int(request.headers.get("content-length", MAX_BODY + 1)) > MAX_BODY:
                raise HTTPException(413, f"an answer has at most {MAX_BODY} bytes, and says how many")
            async with asyncio.timeout(MAX_SECONDS):
                content = await request.body()
            await asyncio.to_thread(study.add, content)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        except (TimeoutError, ClientDisconnect) as error:
            raise HTTPException(408, f"an answer comes whole, within {MAX_SECONDS} seconds") from error
        except sqlite3.Error as error:  # as of a full disk
            raise HTTPException(503, f"{error}; tell whoever invited you") from error

    return app
