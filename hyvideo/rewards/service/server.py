"""The reward service: a frozen scorer behind HTTP, for training runs without enough memory for it.

    POST /score          scores of videos (protocol.py)
    POST /check_prompts  a JSON list of prompts -> whether the scorer can score them
    GET  /health

One request is scored at a time, while the videos of the next one arrive.
"""

import asyncio
import math

from fastapi import Depends, FastAPI, HTTPException, Request
from starlette.concurrency import run_in_threadpool

from hyvideo.files.http_guard import access, read_body
from hyvideo.files.text import shorten
from hyvideo.rewards import contract
from hyvideo.rewards.rewards import Scorer, ScoreResult, Scores
from hyvideo.rewards.scoring import score_safely
from hyvideo.rewards.service.protocol import PROMPTS, Checked, Scored, decode_request

MAX_BYTES = 2**31  # of the videos of a request
MAX_PROMPT_BYTES = 2**26  # of a list of prompts
BODY_SECONDS = 100.0  # for a request to arrive


def create_app(
    scorer: Scorer,
    *,
    token: str | None = None,  # that requests need, except those for /health
    max_videos: int = 16,  # that are scored together
    identity: str = "",  # of the scorer; a client rejects a service whose identity changes
) -> FastAPI:
    """Return the service of a scorer."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    protected = [Depends(access(token))]
    arriving = asyncio.Semaphore(2)  # bodies in memory: one that is scored, and the next one
    scoring = asyncio.Lock()

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok"}

    @app.post("/check_prompts", dependencies=protected)
    async def check_prompts(request: Request) -> Checked:
        body = await read_body(request, max_bytes=MAX_PROMPT_BYTES, seconds=BODY_SECONDS)
        try:
            prompts = PROMPTS.validate_json(body)
        except ValueError as error:
            raise HTTPException(422, f"the body must be a JSON list of prompts: {error}") from error
        try:
            await run_in_threadpool(contract.check_prompts, scorer, prompts)
        except ValueError as error:
            return Checked(problem=shorten(str(error)), identity=identity)
        return Checked(problem=None, identity=identity)

    @app.post("/score", dependencies=protected)
    async def score(request: Request) -> Scored:
        async with arriving:
            body = await read_body(request, max_bytes=MAX_BYTES, seconds=BODY_SECONDS)
            async with scoring:
                if await request.is_disconnected():
                    raise HTTPException(499, "the client disconnected")
                results = await run_in_threadpool(_score, scorer, body, max_videos)
        return Scored(
            scores=[_as_json(result.scores) for result in results],
            reasons=[result.reason for result in results],
            identity=identity,
        )

    return app


def _score(scorer: Scorer, body: bytes, max_videos: int) -> list[ScoreResult]:
    """Return the result of each video of a request. Raises HTTPException if it is invalid."""
    try:
        videos, prompts, fps = decode_request(body)
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
    results = []
    for start in range(0, len(videos), max_videos):
        part = slice(start, start + max_videos)
        results += score_safely(scorer, videos[part], prompts[part], fps=fps, retries=0)
    return results


def _as_json(scores: Scores) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}
