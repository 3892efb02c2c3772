"""The page on which raters compare: over HTTP, where a rater's token is the path, or as files for each rater.

GET  /TOKEN/                        the page, at the first pair without an answer
GET  /TOKEN/clips/PAIR-first.mp4    a clip of one of the rater's pairs, and PAIR-second.mp4
POST /TOKEN/answer                  {"pair": ..., "answers": {question: answer}} -> the state with the next pair
"""

import shutil
from pathlib import Path

import jinja2
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, HTMLResponse

from hyvideo.data.outside import make_folder, parse_json
from hyvideo.evaluation.preference.answers import Study
from hyvideo.evaluation.preference.study import SIDES, VIDEOS
from hyvideo.records.run_files import write_text

MAX_BODY = 10_000  # bytes of an answer
TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
TEMPLATES.policies["json.dumps_kwargs"] = {"sort_keys": False}


def create_app(study: Study) -> FastAPI:
    """The service of a study. Who has no token of it learns nothing; who has one sees the rater's own pairs alone."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, call_next) -> Response:
        size = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers or len(size) > 9 or int(size) > MAX_BODY:
            return Response(f"an answer has at most {MAX_BODY} bytes, and says how many", 413)
        if request.url.path.split("/")[1] not in study.raters:
            return Response("there is nothing here; ask for your link again", 404)
        response = await call_next(request)
        response.headers["cache-control"] = "private, max-age=86400" if "/clips/" in request.url.path else "no-store"
        return response

    @app.get("/{token}/")
    def show(token: str) -> HTMLResponse:
        return HTMLResponse(TEMPLATES.get_template("page.html").render(state=study.state(token)))

    @app.get("/{token}/clips/{pair}-{side}.mp4")
    def clip(token: str, pair: str, side: str) -> FileResponse:
        if side not in SIDES or pair not in study.raters[token]["pairs"]:
            raise HTTPException(404, "there is no such clip")
        return FileResponse(study.folder / VIDEOS / study.raters[token]["pairs"][pair][side])

    @app.post("/{token}/answer")
    async def answer(token: str, request: Request) -> dict:
        try:
            given = parse_json(await request.body())
            if not isinstance(given, dict):
                raise ValueError("an answer is an object with pair and answers")
            await run_in_threadpool(study.add, token, given.get("pair"), given.get("answers"))
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        return await run_in_threadpool(study.state, token)

    return app


def write_static(study: Study, out: Path) -> list[Path]:
    """Writes a folder for each rater, whose index.html needs no server; gives the pages."""
    pages = [out / rater["name"] / "index.html" for rater in study.raters.values()]
    for page, (token, rater) in zip(pages, study.raters.items()):
        make_folder(page.parent / "clips")
        for name, pair in rater["pairs"].items():
            for side in SIDES:
                shutil.copy2(study.folder / VIDEOS / pair[side], page.parent / "clips" / f"{name}-{side}.mp4")
        pairs = [{"id": name, "prompt": pair["prompt"]} for name, pair in rater["pairs"].items()]
        state = {"questions": study.questions, "token": token, "pairs": pairs}
        write_text(page, TEMPLATES.get_template("page.html").render(state=state))
    return pages
