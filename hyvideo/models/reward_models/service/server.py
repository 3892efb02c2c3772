"""The reward service: one frozen scorer behind HTTP, for training runs that have no room for it.

POST /score          scores of videos (protocol.py); requests that wait are scored together, 503 when there are too many
POST /check_prompts  {"prompts": [...]} -> {"problem": null or a sentence}
GET  /health /info /metrics
"""

import asyncio
import hmac
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse
from starlette.requests import ClientDisconnect

from hyvideo.models.reward_models.async_scorer import score_safely
from hyvideo.models.reward_models.rewards import Scorer, ScoreResult
from hyvideo.models.reward_models.service.protocol import (
    BadRequest,
    Limits,
    ScoreRequest,
    check_texts,
    decode_request,
    encode_answer,
    parse_json,
)

_DECODERS = 4  # requests that are decoded at a time: films take a core and their frames


@dataclass(eq=False)
class _PendingRequest:
    """A request and the results of the first of its videos; the answer is there when all are."""

    request: ScoreRequest
    answer: "Future[list[ScoreResult]]" = field(default_factory=Future)
    results: list[ScoreResult] = field(default_factory=list)

    def add(self, result: ScoreResult) -> None:
        self.results.append(result)
        if len(self.results) == len(self.request.videos) and self.answer.set_running_or_notify_cancel():
            self.answer.set_result(self.results)


class _QueuedVideo(NamedTuple):
    pending: _PendingRequest
    number: int  # in its request


class Batcher:
    """Scores videos in one thread, in the order of their requests; those that arrive while it works go together.

    A batch has one rate of frames. A request with more videos than fit is scored in several batches. Videos that are
    not begun when the answer to their request is cancelled are never scored.

    Args:
        max_videos: In one call of the scorer.
        wait: Seconds to wait for more videos.
    """

    def __init__(self, scorer: Scorer, *, max_videos: int = 16, wait: float = 0.01):
        if max_videos < 1:
            raise ValueError(f"max_videos must be at least 1, got {max_videos}")
        self.scorer, self.max_videos, self.wait = scorer, max_videos, wait
        self.counts = {"requests": 0, "batches": 0, "videos": 0, "failures": 0}
        self.seconds = 0.0
        self._queue: queue.Queue[_QueuedVideo | None] = queue.Queue()
        self._left: _QueuedVideo | None = None  # did not fit into the last batch
        self._thread = threading.Thread(target=self._work, name="scorer", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> float:
        """Seconds that the videos in the queue will take, at the mean time of those before."""
        return self._queue.qsize() * self.seconds / max(1, self.counts["videos"])

    def submit(self, request: ScoreRequest) -> "Future[list[ScoreResult]]":
        assert request.videos, "a request has videos"
        pending = _PendingRequest(request)
        self.counts["requests"] += 1
        for number in range(len(request.videos)):
            self._queue.put(_QueuedVideo(pending, number))
        return pending.answer

    def close(self) -> None:
        """Ends the thread after what has been submitted."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next_batch():
            start = time.perf_counter()
            results = score_safely(
                self.scorer,
                [pending.request.videos[number] for pending, number in batch],
                [pending.request.prompts[number] for pending, number in batch],
                fps=batch[0].pending.request.fps,
                retries=0,
            )
            self._count(results, time.perf_counter() - start)
            for video, result in zip(batch, results):
                video.pending.add(result)

    def _next_batch(self) -> list[_QueuedVideo]:
        """Videos of one rate of frames whose requests are not cancelled; empty when the service ends."""
        batch: list[_QueuedVideo] = []
        deadline = math.inf
        while len(batch) < self.max_videos:
            try:
                video = self._left or self._queue.get(timeout=_until(deadline))
            except queue.Empty:
                break
            self._left = None
            if video is None:
                if batch:
                    self._queue.put(None)  # for the next round
                break
            if video.pending.answer.cancelled():
                continue
            if batch and video.pending.request.fps != batch[0].pending.request.fps:
                self._left = video
                break
            if not batch:
                deadline = time.monotonic() + self.wait
            batch.append(video)
        return batch

    def _count(self, results: list[ScoreResult], seconds: float) -> None:
        failures = sum(result.reason is not None for result in results)
        for name, value in (("batches", 1), ("videos", len(results)), ("failures", failures)):
            self.counts[name] += value
        self.seconds += seconds


def _until(deadline: float) -> float | None:
    """Seconds left for a wait, None for one without end."""
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


class ConcurrencyLimit:
    """Requests under way, at most ``limit`` of them: others are told after how many seconds to retry."""

    def __init__(self, limit: int):
        if limit < 1:
            raise ValueError(f"max_waiting must be at least 1, got {limit}")
        self.limit, self.in_flight = limit, 0

    @contextmanager
    def slot(self, retry_after: float) -> Iterator[None]:
        """Context of one request. Raises HTTPException 503 with ``retry_after`` seconds if no slot is free."""
        if self.in_flight >= self.limit:
            headers = {"retry-after": str(min(60, math.ceil(retry_after) or 1))}
            raise HTTPException(503, f"{self.in_flight} requests are waiting already", headers=headers)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


def create_app(
    scorer: Scorer,
    *,
    name: str,
    token: str | None = None,
    limits: Limits | None = None,
    max_videos: int = 16,
    max_waiting: int = 64,
) -> FastAPI:
    """The service around a scorer.

    Args:
        token: Bearer token that every request but /health needs.
        max_videos: In one call of the scorer.
        max_waiting: Requests to score that may be under way.
    """
    limits = limits or Limits()
    concurrency, decoders = ConcurrencyLimit(max_waiting), anyio.CapacityLimiter(_DECODERS)
    batcher = Batcher(scorer, max_videos=max_videos)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await anyio.to_thread.run_sync(batcher.close)

    app = FastAPI(title="reward service", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    protected = [Depends(_token_check(token))]

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok"}

    @app.get("/info", dependencies=protected)
    async def info() -> dict:
        return {"reward_model": name, "max_videos": limits.videos, "max_body": limits.body}

    @app.get("/metrics", dependencies=protected)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(_prometheus(batcher, concurrency))

    @app.post("/check_prompts", dependencies=protected)
    async def check_prompts(request: Request) -> dict:
        prompts = await _json_prompts(request, limits)
        try:
            await anyio.to_thread.run_sync(scorer.check_prompts, prompts)
        except ValueError as error:
            return {"problem": str(error)}
        return {"problem": None}

    @app.post("/score", dependencies=protected)
    async def score(request: Request) -> dict:
        with concurrency.slot(batcher.backlog):
            decoded = await _decoded(request, limits, decoders)
            return encode_answer(await _answer(batcher.submit(decoded), request))

    return app


async def _decoded(request: Request, limits: Limits, decoders: anyio.CapacityLimiter) -> ScoreRequest:
    """The videos and prompts of a request; its body, of which the frames are copies, is let go."""
    body = await _body(request, limits)
    try:
        return await anyio.to_thread.run_sync(decode_request, body, limits, limiter=decoders)
    except BadRequest as error:
        raise HTTPException(413 if error.is_too_large else 422, str(error)) from error


async def _answer(answer: "Future[list[ScoreResult]]", request: Request) -> list[ScoreResult]:
    """The answer, waited for without a thread; it is cancelled when the client disconnects."""
    results, disconnect = asyncio.wrap_future(answer), asyncio.ensure_future(_until_disconnect(request))
    try:
        await asyncio.wait([results, disconnect], return_when=asyncio.FIRST_COMPLETED)
        if not results.done():
            raise HTTPException(499, "the client has gone")
        return results.result()
    finally:
        results.cancel()
        disconnect.cancel()


async def _until_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _token_check(token: str | None) -> Callable[[Request], Coroutine[Any, Any, None]]:
    # Asynchronous, or each check would need one of the threads in which prompts are checked.
    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise HTTPException(401, "a bearer token is needed, and this is not the one")

    return check


async def _body(request: Request, limits: Limits) -> bytes:
    """The body, refused as soon as it is known to be too large or too slow."""
    too_large = HTTPException(413, f"a request may have {limits.body} bytes")
    claimed = request.headers.get("content-length", "0")
    if claimed.isdigit() and int(claimed) > limits.body:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body:
                    raise too_large
    except TimeoutError as error:
        raise HTTPException(408, f"a request must arrive within {limits.seconds} s") from error
    except ClientDisconnect as error:
        raise HTTPException(499, "the client has gone") from error
    return bytes(body)


async def _json_prompts(request: Request, limits: Limits) -> list[str]:
    try:
        content = parse_json(await _body(request, limits))
        return check_texts(content["prompts"])
    except (TypeError, KeyError) as error:
        raise HTTPException(422, 'the body must be {"prompts": [...]}') from error
    except ValueError as error:
        raise HTTPException(422, str(error)) from error


def _prometheus(batcher: Batcher, concurrency: ConcurrencyLimit) -> str:
    lines = [f"reward_{name}_total {value}" for name, value in batcher.counts.items()]
    return "\n".join(
        [*lines, f"reward_seconds_total {batcher.seconds:.3f}", f"reward_waiting {concurrency.in_flight}", ""]
    )
