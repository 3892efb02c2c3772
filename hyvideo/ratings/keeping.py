"""Videos that a person keeps or drops, one at a time: the CSV file of the answers, and its page."""

import hmac
import threading
from collections.abc import Callable
from pathlib import Path

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse
from pydantic import BaseModel, StrictBool, ValidationError

from hyvideo.data.examples import (
    COLUMNS,
    OPTIONAL_COLUMNS,
    existing_video,
    parse_keep,
)
from hyvideo.files.files import publish
from hyvideo.files.tables import csv_text, read_table
from hyvideo.files.templates import fill
from hyvideo.ratings.rating import store_answer


class Answer(BaseModel):
    """Whether the video of this number, from 0, is kept."""

    number: int
    keep: StrictBool


class Keeping:
    """The rows of a CSV file of videos, whose column `keep` has the answers; without an answer it is
    empty. Threads can share it.

    Raises ValueError, naming the row, for a missing video and an answer that is not 1 or 0.
    """

    def __init__(self, path: Path):
        self.path = path
        table = read_table(path, "videos_csv")
        optional = [name for name in OPTIONAL_COLUMNS if name != "keep"]
        self.rows = table.select("videos_csv", (*COLUMNS, "keep"), optional)
        self.videos: list[Path] = []
        self.answers: list[bool | None] = []
        self._lock = threading.Lock()
        for number, row in enumerate(self.rows, start=1):
            place = f"row {number} of {path}"
            self.videos.append(existing_video(table, row["video"], "video", place))
            answer = parse_keep(row["keep"], place) if row["keep"].strip() else None
            self.answers.append(answer)

    @property
    def num_unanswered(self) -> int:
        return self.answers.count(None)

    def add(self, content: bytes) -> None:
        """Store an `Answer` as JSON, in place of an earlier one, in the file.

        Raises ValueError for an invalid answer.
        """
        try:
            given = Answer.model_validate_json(content)
        except ValidationError as error:
            raise ValueError("an answer must have a number and keep, true or false") from error
        if not 0 <= given.number < len(self.rows):
            raise ValueError(f"number must be from 0 to {len(self.rows) - 1}, got {given.number}")
        with self._lock:
            self.rows[given.number]["keep"] = str(int(given.keep))
            columns = list(self.rows[0])
            text = csv_text(columns, [[row[name] for name in columns] for row in self.rows])
            with publish(self.path) as temporary:
                temporary.write_text(text, encoding="utf-8")
            self.answers[given.number] = given.keep

    def page(self) -> str:
        """Render the page, at the first video without an answer."""
        return fill(Path(__file__).with_name("keep.html"), keeping=self)


def create_app(keeping: Keeping, token: str, end: Callable[[], None]) -> FastAPI:
    """Return the web service of the page, for those who know the ``token``; the page's last button
    calls ``end``.
    """

    def check(given: str = "") -> None:
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise HTTPException(404, "page not found; please check your link")

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(check)])

    @app.get("/{given}/")
    def show() -> HTMLResponse:
        return HTMLResponse(keeping.page(), headers={"cache-control": "no-store"})

    @app.get("/{given}/clips/{number}.mp4")
    def clip(number: int) -> FileResponse:
        if not 0 <= number < len(keeping.videos) or not keeping.videos[number].is_file():
            raise HTTPException(404, f"there is no video {number}")
        return FileResponse(keeping.videos[number])

    @app.post("/{given}/answers", status_code=204)
    async def add(request: Request) -> None:
        await store_answer(request, keeping.add)

    @app.post("/{given}/end", status_code=204)
    def finish() -> None:
        end()

    return app
