"""The page on which raters compare: over HTTP, where a rater's token is the path, or as files for each rater."""

import asyncio
import shutil
from pathlib import Path

import jinja2
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse
from starlette.requests import ClientDisconnect

from hyvideo.data.outside import make_folder
from hyvideo.evaluation.preference.answers import SIDES, Study

MAX_BODY, MAX_SECONDS = 10_000, 20  # bytes of an answer, and what they may take
TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
TEMPLATES.policies["json.dumps_kwargs"] = {}  # questions in their order


def create_app(study: Study) -> FastAPI:
    """The service of a study. Who has no token of it learns nothing; who has one sees the rater's own pairs alone."""

    def check(token: str = "", pair: str | None = None, side: str = "first") -> None:
        if token not in study.raters or side not in SIDES or pair not in (None, *study.raters[token]["pairs"]):
            raise HTTPException(404, "there is nothing here; ask for your link again")

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(check)])

    @app.get("/{token}/")
    def show(token: str) -> HTMLResponse:
        page = TEMPLATES.get_template("page.html").render(state=study.state(token))
        return HTMLResponse(page, headers={"cache-control": "no-store"})

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

    return app


def write_static(study: Study, out: Path) -> None:
    """Writes a folder for each rater, whose index.html needs no server."""
    for token, rater in study.raters.items():
        folder = out / rater["name"]
        make_folder(folder / "clips")
        for name, pair in rater["pairs"].items():
            for side in SIDES:
                shutil.copy2(study.folder / pair[side], folder / "clips" / f"{name}-{side}.mp4")
        page = TEMPLATES.get_template("page.html").render(state=study.state(token), is_alone=True)
        (folder / "index.html").write_text(page, encoding="utf-8")
