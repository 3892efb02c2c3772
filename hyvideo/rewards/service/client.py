"""Client of the reward service, with a time limit for each request.

It waits for "100 Continue" before it sends the videos, up to 256 MB, so that a busy service can
refuse them first. httpx has no such option, so requests are made with h11 here.
"""

import asyncio
import json
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

import h11
from torch import Tensor

from hyvideo.data.files import parse_json
from hyvideo.data.text import describe_error
from hyvideo.rewards.rewards import SERVICE_ATTEMPTS, Scorer, ScoreResult, ScorerUnavailable
from hyvideo.rewards.service import protocol

T = TypeVar("T")

MAX_REQUEST_BYTES = 2**28
MAX_ANSWER = 2**24  # bytes
_CONTINUE_TIMEOUT = 1.0  # seconds to wait for "100 Continue" before the body is sent without it
_CHUNK = 2**20  # bytes that are copied at a time while a body is sent


class RequestRejected(RuntimeError):
    """Raised if the service rejects a request as too large or malformed."""


class _Busy(ValueError):
    """Raised if the service is busy; the arguments are its message and the seconds until a
    retry.
    """


class RemoteScorer(Scorer):
    """Scorer that sends videos to reward services, ``http://host:port``, in rotation.

    A service that is unreachable, too slow or returns an invalid answer is skipped during a
    cooldown. A busy service is retried after the time in its Retry-After header.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        # seconds per request, from the first byte sent to the last received
        timeout: float = 120.0,
        retries: int = SERVICE_ATTEMPTS - 1,  # how often all services are tried again
        # seconds before the first retry, doubled each time; longer if a service requests it
        backoff: float = 1.0,
        cooldown: float = 30.0,  # seconds for which a service that failed is skipped
        # of the videos in a request; a larger video is sent alone
        max_bytes: int = MAX_REQUEST_BYTES,
        max_videos: int = 16,  # in a request
    ):
        if not urls or not all(map(is_address, urls)):
            raise ValueError(
                "remote_reward_url must be URLs such as http://127.0.0.1:8000, got "
                f"{list(urls)!r:.300}"
            )
        self.urls = [url.rstrip("/") for url in urls]
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.cooldown = cooldown
        self.max_bytes, self.max_videos = max_bytes, max_videos
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._certificates = ssl.create_default_context()
        self._excluded_until = dict.fromkeys(self.urls, 0.0)
        self._turn = 0
        self.identity = ""  # of the scorer of the services, once one has sent it

    def score(self, videos: list[Tensor], prompts: list[str], *, fps: float) -> list[ScoreResult]:
        """Return the result of each video.

        A large batch is divided into requests, which are sent one after the other.

        A rejected request is halved; a video that is rejected alone has a reason instead of scores.
        Raises ScorerUnavailable if the first request is not answered in time; if a later one is
        not, the videos left have the reason.
        """
        results: list[ScoreResult] = []
        pending = deque(divide([video.nbytes for video in videos], self.max_bytes, self.max_videos))
        while pending:
            rows = pending.popleft()
            try:
                results += self._score_together(
                    [videos[row] for row in rows], [prompts[row] for row in rows], fps
                )
            except RequestRejected as error:
                if len(rows) == 1:
                    results.append(ScoreResult({}, str(error)))
                else:
                    half = len(rows) // 2
                    pending.extendleft([rows[half:], rows[:half]])
            except ScorerUnavailable as error:
                if not results:
                    raise
                results += [ScoreResult({}, str(error))] * (len(videos) - len(results))
                break
        return results

    def _score_together(
        self, videos: list[Tensor], prompts: list[str], fps: float
    ) -> list[ScoreResult]:
        body = protocol.encode_request(protocol.ScoreRequest(videos, prompts, fps))
        return self._request(
            "/score", body, lambda answer: protocol.decode_answer(answer, len(videos))
        )

    def check_prompts(self, prompts: list[str]) -> None:
        """Raise ValueError for a prompt that the service's scorer cannot score, or if no service
        answers.
        """
        try:
            body = json.dumps({"prompts": protocol.check_texts(list(prompts))}).encode()
            problem = self._request("/check_prompts", [memoryview(body)], _problem)
        except (ScorerUnavailable, RequestRejected) as error:
            raise ValueError(str(error)) from error
        if problem:
            raise ValueError(problem)

    def _request(self, path: str, body: list[memoryview], read: Callable[[bytes], T]) -> T:
        """Return the first valid answer of a service, decoded by ``read``."""
        problems: dict[str, str] = {}
        pause = 0.0
        for attempt in range(self.retries + 1):
            time.sleep(pause)
            pause = self.backoff * 2**attempt
            for url in self._available_urls():
                try:
                    content = self._post(url + path, body)
                    answer = read(content)
                    self._check_identity(content)
                except _Busy as error:
                    problems[url], seconds = error.args
                    self._excluded_until[url] = time.monotonic() + seconds
                    pause = max(pause, seconds)
                except (h11.ProtocolError, OSError, ValueError) as error:
                    problems[url] = describe_error(error)
                    self._excluded_until[url] = time.monotonic() + self.cooldown
                else:
                    self._excluded_until[url] = 0.0
                    return answer
        details = "; ".join(f"{url}: {problem}" for url, problem in problems.items())
        raise ScorerUnavailable(f"no reward service answered ({details})")

    def _check_identity(self, content: bytes) -> None:
        """Remember the identity of the scorer in the first answer.

        Raises ValueError for an answer of another scorer: the rewards of a run must not change
        their meaning.
        """
        identity = parse_json(content).get("identity", "")
        if not isinstance(identity, str):
            raise ValueError(f"`identity` must be a string, got {identity!r:.100}")
        if self.identity and identity != self.identity:
            raise ValueError(
                "the service has another reward model than at the start of the run: another "
                "class, other options or other weights; start it with the earlier ones"
            )
        self.identity = identity

    def _available_urls(self) -> list[str]:
        """Return the services that are not skipped, starting with the next one; all of them if all
        are skipped.
        """
        self._turn += 1
        order = [self.urls[(self._turn + i) % len(self.urls)] for i in range(len(self.urls))]
        now = time.monotonic()
        return [url for url in order if self._excluded_until[url] <= now] or order

    def _post(self, url: str, body: list[memoryview]) -> bytes:
        """Send a request and return the answer's body.

        Raises TimeoutError if it is not complete in time.
        """
        loop = asyncio.new_event_loop()
        try:
            response, answer = loop.run_until_complete(
                asyncio.wait_for(self._exchange(url, body), self.timeout)
            )
        except TimeoutError as error:
            raise TimeoutError(f"the answer was not complete within {self.timeout} s") from error
        finally:
            loop.close()  # asyncio.run would wait for the thread of a pending DNS lookup
        if response.status_code == 200:
            return answer
        message = answer[:500].decode(errors="replace")
        if response.status_code in (413, 422):
            raise RequestRejected(f"{url} rejected the request ({response.status_code}): {message}")
        retry_after = dict(response.headers).get(b"retry-after", b"")
        if response.status_code == 503 and retry_after.isdigit():
            raise _Busy(f"status 503: {message}", min(float(retry_after), self.timeout))
        raise ValueError(f"status {response.status_code}: {message}")

    async def _exchange(self, url: str, body: list[memoryview]) -> tuple[h11.Response, bytes]:
        """Send a request and read its answer; the body is sent after "100 Continue" or a
        timeout.
        """
        parts = urlsplit(url)
        port, certificates = (443, self._certificates) if parts.scheme == "https" else (80, None)
        reader, writer = await asyncio.open_connection(
            parts.hostname, parts.port or port, ssl=certificates
        )
        # h11 is the HTTP/1.1 protocol without a network. `connection.send` turns an event, such as
        # a request or a part of its body, into bytes for the socket; `connection.next_event`
        # returns the next event in the bytes that have been received. Here, they are an optional
        # "100 Continue" (InformationalResponse), the status (Response), parts of the answer (Data),
        # and EndOfMessage.
        connection = h11.Connection(h11.CLIENT)
        answer = bytearray()
        event = None

        async def receive() -> h11.Event:
            """Return the next event of the service, and wait for its bytes."""
            while True:
                event = connection.next_event()
                if event is not h11.NEED_DATA:
                    return event
                # b"" if the service has closed the connection
                connection.receive_data(await reader.read(2**16))

        headers = {
            "host": parts.netloc.rpartition("@")[2],
            "content-length": str(sum(map(len, body))),
            "connection": "close",
            "expect": "100-continue",
            **self._headers,
        }
        try:
            request = h11.Request(method="POST", target=parts.path, headers=list(headers.items()))
            writer.write(connection.send(request))
            # A service that rejects the request, for example because it is busy, answers before it
            # receives the videos.
            with suppress(TimeoutError):
                event = await asyncio.wait_for(receive(), _CONTINUE_TIMEOUT)
            if not isinstance(event, h11.Response):
                for part in body:
                    for start in range(0, len(part), _CHUNK):
                        writer.write(connection.send(h11.Data(part[start : start + _CHUNK])))
                        await writer.drain()
                # no bytes to send, because the header has the length
                connection.send(h11.EndOfMessage())
            while not isinstance(event, h11.Response):
                event = await receive()
            while isinstance(part := await receive(), h11.Data):
                answer += part.data
                if len(answer) > MAX_ANSWER:
                    raise ValueError(f"the answer is longer than {MAX_ANSWER} bytes")
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)  # lets the event loop close the socket
        return event, bytes(answer)


def divide(sizes: Sequence[int], max_bytes: int, max_videos: int) -> list[range]:
    """Return ranges of videos, in order, each of at most ``max_videos`` and of ``max_bytes`` or one
    video.
    """
    first, total = 0, 0
    ranges = []
    for row, size in enumerate(sizes):
        total += size
        if row > first and (total > max_bytes or row - first == max_videos):
            ranges.append(range(first, row))
            first, total = row, size
    return [*ranges, range(first, len(sizes))]


def _problem(body: bytes) -> str | None:
    answer = parse_json(body)
    problem = answer.get("problem") if isinstance(answer, dict) else 0
    if not isinstance(problem, str | None):
        raise ValueError(
            "the answer of /check_prompts must be an object with `problem`, a string or null"
        )
    return problem and protocol.printable(problem)


def is_address(url: str) -> bool:
    """Return whether ``url`` is an http or https URL with a host."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and " " not in url
            and parts.port != 0
        )
    except ValueError:  # an invalid port
        return False
