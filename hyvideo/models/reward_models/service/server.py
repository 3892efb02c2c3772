"""The reward service: a frozen scorer behind HTTP, for training runs without enough memory for it.

POST /score          scores of videos (protocol.py), one request after the other; 503 if too many are waiting
POST /check_prompts  {"prompts": [...]} -> {"problem": null or a sentence}
GET  /health /metrics
"""

import asyncio
import hmac
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio.to_thread
import torch
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse
from starlette.requests import ClientDisconnect
from torch import Tensor

from hyvideo.data.outside import parse_json
from hyvideo.models.reward_models.async_scorer import score_safely
from hyvideo.models.reward_models.rewards import Scorer, ScoreResult
from hyvideo.models.reward_models.service import protocol
from hyvideo.models.reward_models.service.limits import Limits

_DECODERS = 4  # concurrently decoded requests, each of which needs memory for two copies of its body


class ScorerThread:
    """Scores requests in one thread, in the order of their arrival and at most ``max_videos`` videos at a time."""

    def __init__(self, scorer: Scorer, *, max_videos: int = 16):
        if max_videos < 1:
            raise ValueError(f"max_videos must be at least 1, got {max_videos}")
        self.scorer, self.max_videos = scorer, max_videos
        self.counts = {"requests": 0, "batches": 0, "videos": 0, "failures": 0}
        self.seconds = 0.0
        device = getattr(scorer, "device", None)
        # A new thread starts on GPU 0.
        prepare = partial(torch.cuda.set_device, device) if isinstance(device, torch.device) and device.index else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer", initializer=prepare)

    def seconds_for(self, num_requests: int) -> int:
        """Estimate the seconds needed for requests from the mean time per batch so far, between 1 and 60."""
        return min(60, math.ceil(num_requests * self.seconds / max(1, self.counts["batches"])) or 1)

    async def score(self, request: protocol.ScoreRequest) -> list[ScoreResult]:
        """Return the result of each video; if this is canceled, videos whose scoring has not started are not scored."""
        self.counts["requests"] += 1
        results: list[ScoreResult] = []
        for start in range(0, len(request.videos), self.max_videos):
            part = slice(start, start + self.max_videos)
            score = partial(self._score, request.videos[part], request.prompts[part], request.fps)
            results += await asyncio.get_running_loop().run_in_executor(self._thread, score)
        return results

    def close(self) -> None:
        """Stop the thread after it has scored the current videos."""
        self._thread.shutdown(cancel_futures=True)

    def _score(self, videos: list[Tensor], prompts: list[str], fps: float) -> list[ScoreResult]:
        start = time.perf_counter()
        results = score_safely(self.scorer, videos, prompts, fps=fps, retries=0)
        self.seconds += time.perf_counter() - start
        self.counts["batches"] += 1
        self.counts["videos"] += len(results)
        self.counts["failures"] += sum(result.reason is not None for result in results)
        return results


def create_app(
    scorer: Scorer,
    *,
    token: str | None = None,
    limits: Limits | None = None,
    max_videos: int = 16,
    max_waiting: int = 64,
) -> FastAPI:
    """Create the service. All routes except /health require the token; ``max_waiting`` limits the active requests."""
    if max_waiting < 1:
        raise ValueError(f"max_waiting must be at least 1, got {max_waiting}")
    limits, decoders = limits or Limits(), anyio.CapacityLimiter(_DECODERS)
    scoring, slots = ScorerThread(scorer, max_videos=max_videos), anyio.CapacityLimiter(max_waiting)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await anyio.to_thread.run_sync(scoring.close)

    app = FastAPI(title="reward service", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    protected = [Depends(_token_check(token))]

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok"}

    @app.get("/metrics", dependencies=protected)
    async def metrics() -> PlainTextResponse:
        values = {f"{name}_total": value for name, value in scoring.counts.items()}
        values |= {"seconds_total": f"{scoring.seconds:.3f}", "waiting": slots.borrowed_tokens}
        return PlainTextResponse("".join(f"reward_{name} {value}\n" for name, value in values.items()))

    async def slot() -> AsyncIterator[None]:
        """Hold one of the slots for active requests. Raises HTTPException if none is free."""
        if not slots.available_tokens:
            headers = {"retry-after": str(scoring.seconds_for(max_waiting))}
            raise HTTPException(503, f"{max_waiting} requests are already waiting", headers=headers)
        async with slots:
            yield

    counted = [*protected, Depends(slot)]

    @app.post("/check_prompts", dependencies=counted)
    async def check_prompts(request: Request) -> dict:
        prompts = _prompts(await _body(request, limits.prompts, limits))
        try:
            await anyio.to_thread.run_sync(scorer.check_prompts, prompts)
        except ValueError as error:
            return {"problem": str(error)}
        return {"problem": None}

    @app.post("/score", dependencies=counted)
    async def score(request: Request) -> dict:
        decoded = await _decoded(await _body(request, limits.body, limits), limits, decoders)
        return protocol.encode_answer(await _unless_disconnected(scoring.score(decoded), request))

    return app


async def _decoded(body: bytes, limits: Limits, decoders: anyio.CapacityLimiter) -> protocol.ScoreRequest:
    try:
        return await anyio.to_thread.run_sync(protocol.decode_request, body, limits, limiter=decoders)
    except protocol.BadRequest as error:
        raise HTTPException(413 if isinstance(error, protocol.TooLarge) else 422, str(error)) from error


async def _unless_disconnected(scoring: Coroutine[Any, Any, list[ScoreResult]], request: Request) -> list[ScoreResult]:
    """Return the results, or cancel the scoring if the client disconnects."""
    answer, disconnect = asyncio.ensure_future(scoring), asyncio.ensure_future(_until_disconnect(request))
    try:
        await asyncio.wait([answer, disconnect], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise HTTPException(499, "the client disconnected")
        return answer.result()
    finally:
        answer.cancel()
        disconnect.cancel()


async def _until_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _token_check(token: str | None) -> Callable[[Request], Coroutine[Any, Any, None]]:
    # Asynchronous, because otherwise each check would occupy one of the threads that check prompts.
    async def check(request: Request) -> None:
        header = request.headers.get("authorization", "").encode()
        if token is not None and not hmac.compare_digest(header, f"Bearer {token}".encode()):
            raise HTTPException(401, "the bearer token is missing or wrong")

    return check


async def _body(request: Request, largest: int, limits: Limits) -> bytes:
    """Return the body. Raises HTTPException as soon as it exceeds ``largest`` bytes or is too slow."""
    too_large = HTTPException(413, f"a request may have at most {largest} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > largest:
        raise too_large
    body, start = bytearray(), asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(limits.seconds) as deadline:
            async for chunk in request.stream():
                body += chunk
                if len(body) > largest:
                    raise too_large
                deadline.reschedule(start + limits.seconds + len(body) / limits.rate)
    except TimeoutError as error:
        rule = f"within {limits.seconds} s, or at {limits.rate:g} bytes/s"
        raise HTTPException(408, f"a request must arrive {rule}") from error
    except ClientDisconnect as error:
        raise HTTPException(499, "the client disconnected") from error
    return bytes(body)


def _prompts(body: bytes) -> list[str]:
    try:
        return protocol.check_texts(parse_json(body)["prompts"])
    except (TypeError, KeyError, ValueError) as error:
        raise HTTPException(422, f'the body must be {{"prompts": [...]}}: {error}') from error
