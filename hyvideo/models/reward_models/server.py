"""The reward service: one frozen scorer behind HTTP, for training runs that have no room for it.

POST /score          scores of videos (wire.py); requests that wait are scored together
POST /check_prompts  {"prompts": [...]} -> {"problem": null or what is wrong}
GET  /health /info /metrics
"""

import hmac
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager

import anyio.to_thread
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse

from hyvideo.models.reward_models.judge import score_safely
from hyvideo.models.reward_models.rewards import Scorer, Verdict
from hyvideo.models.reward_models.wire import BadRequest, Limits, ScoreRequest, decode_request, encode_answer


class Batcher:
    """Scores requests in one thread; those that arrive while it works are scored together, if their fps agree.

    Args:
        max_videos: In one call of the scorer.
        wait: Seconds to wait for company.
    """

    def __init__(self, scorer: Scorer, *, max_videos: int = 16, wait: float = 0.01):
        self.scorer, self.max_videos, self.wait = scorer, max_videos, wait
        self.counts = {"requests": 0, "batches": 0, "videos": 0, "failures": 0}
        self.seconds = 0.0
        self._queue: queue.Queue[tuple[ScoreRequest, Future] | None] = queue.Queue()
        self._left: tuple[ScoreRequest, Future] | None = None  # did not fit into the last batch
        self._thread = threading.Thread(target=self._work, name="scorer", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def submit(self, request: ScoreRequest) -> "Future[list[Verdict]]":
        answer: Future[list[Verdict]] = Future()
        self._queue.put((request, answer))
        return answer

    def close(self) -> None:
        """Ends the thread after what has been submitted."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next_batch():
            start = time.perf_counter()
            requests = [request for request, _ in batch]
            verdicts = score_safely(
                self.scorer,
                [video for request in requests for video in request.videos],
                [prompt for request in requests for prompt in request.prompts],
                fps=requests[0].fps,
                retries=0,
            )
            self._count(len(requests), verdicts, time.perf_counter() - start)
            for request, answer in batch:
                answer.set_result(verdicts[: len(request.videos)])
                verdicts = verdicts[len(request.videos) :]

    def _next_batch(self) -> list[tuple[ScoreRequest, Future]]:
        """Requests of one rate of frames; empty when the service ends."""
        first, self._left = self._left or self._queue.get(), None
        if first is None:
            return []
        batch, size = [first], len(first[0].videos)
        deadline = time.monotonic() + self.wait
        while size < self.max_videos:
            try:
                more = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if more is None:
                self._queue.put(None)  # for the next round
                break
            if more[0].fps != first[0].fps or size + len(more[0].videos) > self.max_videos:
                self._left = more
                break
            batch.append(more)
            size += len(more[0].videos)
        return batch

    def _count(self, num_requests: int, verdicts: list[Verdict], seconds: float) -> None:
        failures = sum(verdict.reason is not None for verdict in verdicts)
        for name, value in zip(self.counts, (num_requests, 1, len(verdicts), failures)):
            self.counts[name] += value
        self.seconds += seconds


def create_app(
    scorer: Scorer, *, name: str, token: str | None = None, limits: Limits | None = None, max_videos: int = 16
) -> FastAPI:
    """The service around a scorer.

    Args:
        token: Bearer token that every request but /health needs.
    """
    limits = limits or Limits()
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
        return PlainTextResponse(_prometheus(batcher))

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
        body = await _body(request, limits.body)
        try:
            wanted = await anyio.to_thread.run_sync(decode_request, body, limits)
        except BadRequest as error:
            raise HTTPException(413 if error.is_too_large else 422, str(error)) from error
        answer = batcher.submit(wanted)
        return encode_answer(await anyio.to_thread.run_sync(answer.result))

    return app


def _token_check(token: str | None) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise HTTPException(401, "a bearer token is needed, and this is not the one")

    return check


async def _body(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be too large."""
    too_large = HTTPException(413, f"a request may have {limit} bytes")
    claimed = request.headers.get("content-length", "0")
    if claimed.isdigit() and int(claimed) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


async def _json_prompts(request: Request, limits: Limits) -> list[str]:
    import json

    try:
        content = json.loads(await _body(request, limits.body))
        prompts = content["prompts"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise HTTPException(422, 'the body must be {"prompts": [...]}') from error
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise HTTPException(422, "prompts must be a list of strings")
    return prompts


def _prometheus(batcher: Batcher) -> str:
    lines = [f"reward_{name}_total {value}" for name, value in batcher.counts.items()]
    return "\n".join([*lines, f"reward_seconds_total {batcher.seconds:.3f}", f"reward_waiting {batcher.waiting}", ""])
