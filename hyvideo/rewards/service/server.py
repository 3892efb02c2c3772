"""The reward service: a frozen scorer behind HTTP, for training runs without enough memory for it.

    POST /score          scores of videos (protocol.py); 503 if too many requests wait
    POST /check_prompts  {"prompts": [...]} -> {"problem": null or a sentence}
    GET  /health /metrics

Waiting requests are scored in batches.
"""

import asyncio
import hmac
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio.to_thread
import torch
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse
from starlette.requests import ClientDisconnect
from torch import Tensor

from hyvideo.data.files import parse_json
from hyvideo.rewards import contract
from hyvideo.rewards.rewards import Scorer, ScoreResult
from hyvideo.rewards.scoring import score_safely
from hyvideo.rewards.service import protocol
from hyvideo.rewards.service.limits import MAX_WAITING, Limits

_DECODERS = 4  # threads; those that check prompts stay free


class _QueuedVideo(NamedTuple):
    video: Tensor
    prompt: str
    fps: float
    result: "Future[ScoreResult]"


class Batcher:
    """Scores videos in one thread, in the order of their requests, and batches those that arrive
    meanwhile.

    A batch has up to ``max_videos`` videos of one frame rate, for which it waits ``wait`` seconds.
    """

    def __init__(self, scorer: Scorer, *, max_videos: int = 16, wait: float = 0.01):
        if max_videos < 1:
            raise ValueError(f"max_videos must be at least 1, got {max_videos}")
        self.scorer = scorer
        self.max_videos = max_videos
        self.wait = wait
        self.counts = {"requests": 0, "batches": 0, "videos": 0, "failures": 0}
        self.seconds = 0.0
        self._waiting: deque[_QueuedVideo] = deque()
        self._is_closed, self._changed = False, threading.Condition()
        self._thread = threading.Thread(target=self._work, name="scorer", daemon=True)
        self._thread.start()

    def seconds_left(self) -> int:
        """Estimate the seconds needed for the queue from the mean time per video so far, between 1
        and 60.
        """
        return min(
            60, math.ceil(len(self._waiting) * self.seconds / max(1, self.counts["videos"])) or 1
        )

    def submit(self, request: protocol.ScoreRequest) -> "list[Future[ScoreResult]]":
        """Queue a request and return one future per video; a future canceled before its batch
        starts is not scored.
        """
        self.counts["requests"] += 1
        videos = [
            _QueuedVideo(v, prompt, request.fps, Future())
            for v, prompt in zip(request.videos, request.prompts)
        ]
        with self._changed:
            self._waiting += videos
            self._changed.notify()
        return [video.result for video in videos]

    def close(self) -> None:
        """Stop the thread after it has scored the submitted videos."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        device = getattr(self.scorer, "device", None)
        if isinstance(device, torch.device) and device.index:
            torch.cuda.set_device(device)  # a new thread starts on GPU 0
        while batch := self._next_batch():
            start = time.perf_counter()
            videos, prompts, rates, pending = map(list, zip(*batch))
            results = score_safely(self.scorer, videos, prompts, fps=rates[0], retries=0)
            self.seconds += time.perf_counter() - start
            self.counts["batches"] += 1
            self.counts["videos"] += len(results)
            self.counts["failures"] += sum(result.reason is not None for result in results)
            for future, result in zip(pending, results):
                future.set_result(result)

    def _next_batch(self) -> list[_QueuedVideo]:
        """Wait for queued videos and return some of equal frame rate, without canceled ones; empty
        when closed.
        """
        batch: list[_QueuedVideo] = []
        with self._changed:
            while not batch:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    break
                self._changed.wait_for(
                    lambda: len(self._waiting) >= self.max_videos or self._is_closed, self.wait
                )
                fps = self._waiting[0].fps
                while (
                    self._waiting and self._waiting[0].fps == fps and len(batch) < self.max_videos
                ):
                    video = self._waiting.popleft()
                    if video.result.set_running_or_notify_cancel():
                        batch.append(video)
        return batch


def create_app(
    scorer: Scorer,
    *,
    token: str | None = None,
    limits: Limits | None = None,
    max_videos: int = 16,
    max_waiting: int = MAX_WAITING,
    identity: str = "",  # of the scorer; a client rejects a service whose identity changes
) -> FastAPI:
    """Create the service.

    All routes except /health require the token; ``max_waiting`` limits the active requests.
    """
    if max_waiting < 1:
        raise ValueError(f"max_waiting must be at least 1, got {max_waiting}")
    assert limits is None or limits.body <= limits.memory, "a body must fit in the memory"
    limits, decoders = limits or Limits(), anyio.CapacityLimiter(_DECODERS)
    batcher = Batcher(scorer, max_videos=max_videos)
    active, memory = _ActiveRequests(limits, max_waiting, batcher), _Memory(limits.memory)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await anyio.to_thread.run_sync(batcher.close)

    app = FastAPI(
        title="reward service", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    protected = [Depends(_token_check(token))]

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok"}

    @app.get("/metrics", dependencies=protected)
    async def metrics() -> PlainTextResponse:
        values = {f"{name}_total": value for name, value in batcher.counts.items()}
        values["seconds_total"] = f"{batcher.seconds:.3f}"
        values["waiting"] = active.slots.borrowed_tokens
        return PlainTextResponse(
            "".join(f"reward_{name} {value}\n" for name, value in values.items())
        )

    counted = [*protected, Depends(active.slot)]

    @app.post("/check_prompts", dependencies=counted)
    async def check_prompts(request: Request) -> dict:
        prompts = _prompts(await active.body(request, limits.prompts))
        try:
            await anyio.to_thread.run_sync(contract.check_prompts, scorer, prompts)
        except ValueError as error:
            return {"problem": protocol.printable(str(error)), "identity": identity}
        return {"problem": None, "identity": identity}

    @app.post("/score", dependencies=counted)
    async def score(request: Request) -> dict:
        async with memory.hold(_length(request, limits.body)):
            decoded = await _decoded(await active.body(request, limits.body), limits, decoders)
            results = await _answer(batcher.submit(decoded), request)
            return protocol.encode_answer(results) | {"identity": identity}

    return app


async def _decoded(
    body: bytearray, limits: Limits, decoders: anyio.CapacityLimiter
) -> protocol.ScoreRequest:
    try:
        return await anyio.to_thread.run_sync(
            protocol.decode_request, body, limits, limiter=decoders
        )
    except protocol.BadRequest as error:
        raise HTTPException(422, str(error)) from error


async def _answer(results: "list[Future[ScoreResult]]", request: Request) -> list[ScoreResult]:
    """Wait for the results without blocking a thread; cancel them if the client disconnects."""
    answer = asyncio.gather(*map(asyncio.wrap_future, results))
    disconnect = asyncio.ensure_future(_until_disconnect(request))
    try:
        await asyncio.wait([answer, disconnect], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise HTTPException(499, "the client disconnected")
        return answer.result()
    finally:
        for pending in (*results, answer, disconnect):
            pending.cancel()


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


class _ActiveRequests:
    """Active requests, and the deadlines of those whose bodies are arriving.

    Every byte extends a deadline.
    """

    def __init__(self, limits: Limits, max_waiting: int, batcher: Batcher):
        self.limits = limits
        self.batcher = batcher
        self.slots = anyio.CapacityLimiter(max_waiting)
        self._deadlines: set[asyncio.Timeout] = set()

    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the slots; if none is free, drop the slowest body or answer 503."""
        if self.slots.available_tokens < 1 and not self._drop_slowest():
            headers = {"retry-after": str(self.batcher.seconds_left())}
            raise HTTPException(
                503, f"{self.slots.total_tokens} requests are already waiting", headers=headers
            )
        async with self.slots:
            yield

    async def body(self, request: Request, largest: int) -> bytearray:
        """Return the body.

        Raises HTTPException as soon as it exceeds ``largest`` bytes or is too slow.
        """
        _length(request, largest)
        body, start = bytearray(), asyncio.get_running_loop().time()
        deadline = asyncio.timeout(self.limits.seconds)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > largest:
                        raise _too_large(largest)
                    if deadline in self._deadlines:  # a dropped body must not get its time back
                        # from the start, not from now: `_drop_slowest` compares these deadlines
                        deadline.reschedule(
                            start + self.limits.seconds + len(body) / self.limits.rate
                        )
        except TimeoutError as error:
            seconds, rate = self.limits.seconds, self.limits.rate
            raise HTTPException(
                408, f"a request must arrive within {seconds} s, or at {rate:g} bytes/s"
            ) from error
        except ClientDisconnect as error:
            raise HTTPException(499, "the client disconnected") from error
        finally:
            self._deadlines.discard(deadline)
        return body

    def _drop_slowest(self) -> bool:
        """Drop the body that lags most behind ``limits.rate``; False if none lags by 5 % of
        ``limits.seconds``.
        """
        now = asyncio.get_running_loop().time()
        slowest = min(self._deadlines, key=asyncio.Timeout.when, default=None)
        if slowest is None or slowest.when() > now + 0.95 * self.limits.seconds:
            return False
        self._deadlines.discard(slowest)
        slowest.reschedule(now)
        return True


class _Memory:
    """Bytes for the bodies of requests, which get them in the order of their arrival."""

    def __init__(self, size: int):
        self._free = size
        self._next, self._released = asyncio.Lock(), asyncio.Event()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Wait until ``size`` bytes are free, and hold them."""
        async with self._next:  # the lock is fair: one request waits for bytes, the others for it
            while self._free < size:
                self._released.clear()
                await self._released.wait()
            self._free -= size
        try:
            yield
        finally:
            self._free += size
            self._released.set()


def _length(request: Request, largest: int) -> int:
    """Return the length of the body by its header, or ``largest`` without one.

    Raises HTTPException if it is larger.
    """
    length = request.headers.get("content-length", "")
    if not length.isdigit():
        return largest
    if int(length) > largest:
        raise _too_large(largest)
    return int(length)


def _too_large(largest: int) -> HTTPException:
    return HTTPException(413, f"a request may have at most {largest} bytes")


def _prompts(body: bytearray) -> list[str]:
    try:
        return protocol.check_texts(parse_json(body)["prompts"])
    except (TypeError, KeyError, ValueError) as error:
        raise HTTPException(422, f'the body must be {{"prompts": [...]}}: {error}') from error
