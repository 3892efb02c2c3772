"""The page on which raters compare: over HTTP, where a rater's token is the path, or as files for each rater.

GET  /TOKEN/                        the page, at the first pair without an answer
GET  /TOKEN/clips/PAIR-first.mp4    a clip of one of the rater's pairs, and PAIR-second.mp4
POST /TOKEN/answer                  {"pair": ..., "answers": {question: answer}} -> the next pair; 409: it was another
"""

import asyncio
import secrets
import shutil
from pathlib import Path

import jinja2
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse

from hyvideo.data.outside import make_folder, parse_json
from hyvideo.evaluation.preference.answers import Study
from hyvideo.evaluation.preference.study import SIDES, VIDEOS
from hyvideo.records.run_files import write_text

MAX_BODY = 10_000  # bytes of an answer
MAX_SECONDS = 20  # for an answer to arrive
HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-store"}
CLIP_HEADERS = HEADERS | {"cache-control": "private, max-age=86400"}  # or every loop would fetch it anew
SOURCES = "default-src 'none'; media-src 'self'; connect-src 'self'; img-src data:; "
SOURCES += "style-src 'nonce-{0}'; script-src 'nonce-{0}'"
TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)


def create_app(study: Study) -> FastAPI:
    """The service of a study. Who has no token of it learns nothing; who has one sees the rater's own pairs alone."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def pairs_of(token: str) -> dict[str, dict]:
        if token not in study.pairs:
            raise HTTPException(404, "there is nothing here; ask for your link again")
        return study.pairs[token]

    @app.get("/{token}/")
    def show(token: str) -> HTMLResponse:
        pairs_of(token)
        nonce = secrets.token_urlsafe(16)
        page = TEMPLATES.get_template("page.html").render(state=study.state(token), nonce=nonce)
        return HTMLResponse(page, headers=HEADERS | {"content-security-policy": SOURCES.format(nonce)})

    @app.get("/{token}/clips/{pair}-{side}.mp4")
    def clip(token: str, pair: str, side: str) -> FileResponse:
        if side not in SIDES or pair not in pairs_of(token):
            raise HTTPException(404, "there is no such clip")
        return FileResponse(study.folder / VIDEOS / study.pairs[token][pair][side], headers=CLIP_HEADERS)

    @app.post("/{token}/answer")
    async def answer(token: str, request: Request) -> JSONResponse:
        pairs = pairs_of(token)
        try:
            given = parse_json(await _small_body(request))
            if not isinstance(given, dict) or given.keys() != {"pair", "answers"}:
                raise ValueError("an answer is an object with pair and answers")
            awaited = (await run_in_threadpool(study.state, token))["pair"]
            is_awaited = awaited is not None and given["pair"] == awaited["id"]
            if is_awaited or given["pair"] not in list(pairs):
                await run_in_threadpool(study.add, token, **given)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        return JSONResponse(await run_in_threadpool(study.state, token), 200 if is_awaited else 409, headers=HEADERS)

    return app


async def _small_body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    raise HTTPException(413, f"an answer has at most {MAX_BODY} bytes")
    except TimeoutError as error:
        raise HTTPException(408, f"an answer must arrive within {MAX_SECONDS} s") from error
    return bytes(body)


def write_static(study: Study, out: Path) -> list[Path]:
    """Writes a folder for each rater, whose index.html needs no server; gives the pages."""
    pages = []
    for token, rater in study.raters.items():
        make_folder(out / rater["name"] / "clips")
        for pair, side in ((pair, side) for pair in rater["pairs"] for side in SIDES):
            copy = out / rater["name"] / "clips" / f"{pair['id']}-{side}.mp4"
            shutil.copy2(study.folder / VIDEOS / pair[side], copy)
        pairs = [{"id": pair["id"], "prompt": pair["prompt"]} for pair in rater["pairs"]]
        state = {"questions": study.questions, "token": token, "pairs": pairs}
        pages.append(out / rater["name"] / "index.html")
        write_text(pages[-1], TEMPLATES.get_template("page.html").render(state=state))
    return pages
