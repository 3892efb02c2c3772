"""Client of the reward service: the scorer ``remote``."""

import json
import math
import os
import time
import urllib.request
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
from httpx_retries import Retry, RetryTransport
from torch import Tensor

from hyvideo.files.text import describe_error, shorten
from hyvideo.rewards.rewards import SERVICE_ATTEMPTS, Scorer, ScoreResult, ScorerUnavailable
from hyvideo.rewards.service.protocol import Checked, Scored, encode_request

MAX_REQUEST_BYTES = 2**28  # of the videos in a request; a larger video is sent alone
CONNECT_SECONDS = 10.0
COOLDOWN = 30.0  # seconds for which a service that failed is asked last

Answer = TypeVar("Answer", Scored, Checked)


def proxy_for(url: str) -> str | None:
    """Return the proxy of the environment for an address; none on this machine and for hosts in
    NO_PROXY.
    """
    address = httpx.URL(url)
    is_local = address.host in ("localhost", "::1") or address.host.startswith("127.")
    if is_local or urllib.request.proxy_bypass(address.host):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(address.scheme, proxies.get("all"))


class RequestRejected(ValueError):
    """Raised if the service rejects a request as too large or malformed."""


class RemoteScorer(Scorer):
    """Scorer that sends videos to reward services of one reward model, in rotation.

    A service that is unreachable, too slow or busy is tried again, then the next one. The
    environment variable REWARD_SERVER_TOKEN has the token of services on other machines.

    Raises ValueError for an invalid address.
    """

    dimensions = ()  # those in the answers
    free_options = ("url",)  # because the services tell their `identity`

    def __init__(
        self,
        path: object = None,  # unused, like ``device``, because the model is elsewhere
        *,
        device: object = None,
        url: str | list[str] = "",  # http://host:port, several with commas or as a list
        timeout: float = 300.0,  # seconds without receiving or sending a byte
        retries: int = SERVICE_ATTEMPTS - 1,
        backoff: float = 1.0,  # about the seconds before the first retry, doubled each time
        max_videos: int = 16,  # in a request
    ):
        given = url.split(",") if isinstance(url, str) else url
        urls = [str(each).strip() for each in given]
        if not urls or not all(map(is_address, urls)):
            raise ValueError(
                "the option url of reward model remote must be a URL such as "
                f"http://127.0.0.1:8000, got {url!r:.300}"
            )
        self.max_videos = max_videos
        self.identity = ""  # of the scorer of the services, once one has sent it
        token = os.environ.get("REWARD_SERVER_TOKEN")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS))
        retry = Retry(
            total=retries,
            allowed_methods=["GET", "POST"],
            backoff_factor=backoff / 2,
            max_backoff_wait=timeout,
        )
        self._clients = [
            httpx.Client(
                base_url=address,
                headers=headers,
                timeout=limits,
                # httpx does not read the environment's proxies for a transport of ours
                transport=RetryTransport(
                    transport=httpx.HTTPTransport(proxy=proxy_for(address)), retry=retry
                ),
            )
            for address in urls
        ]
        self._failed_at = dict.fromkeys(self._clients, -math.inf)

    def score(self, videos: list[Tensor], prompts: list[str], *, fps: float) -> list[ScoreResult]:
        """Return the result of each video.

        Raises ScorerUnavailable if no service answers the first request; if none answers a later
        one, the videos left have the reason. Raises RequestRejected for an invalid request.
        """
        largest = max(video.nbytes for video in videos)
        size = max(1, min(self.max_videos, MAX_REQUEST_BYTES // largest))
        results: list[ScoreResult] = []
        for start in range(0, len(videos), size):
            part = slice(start, start + size)
            try:
                results += self._score(videos[part], prompts[part], fps)
            except ScorerUnavailable as error:
                if not results:
                    raise
                missing = ScoreResult({}, str(error))
                return results + [missing] * (len(videos) - len(results))
        return results

    def _score(self, videos: list[Tensor], prompts: list[str], fps: float) -> list[ScoreResult]:
        body = encode_request(videos, prompts, fps)
        answer = self._post("/score", body, Scored, num_videos=len(videos))
        results = []
        for scores, reason in zip(answer.scores, answer.reasons):
            numbers = {name: math.nan if n is None else n for name, n in scores.items()}
            results.append(ScoreResult(numbers, reason))
        return results

    def score_with_gradient(self, videos: Tensor, prompts: list[str], *, fps: float) -> Tensor:
        """Raise ValueError."""
        raise ValueError(
            "a reward service returns numbers without a gradient; use scorers in this process for "
            "reward gradients"
        )

    def check_prompts(self, prompts: list[str]) -> None:
        """Raise ValueError for a prompt that the service's scorer cannot score, or if no service
        answers.
        """
        try:
            answer = self._post("/check_prompts", json.dumps(prompts).encode(), Checked)
        except ScorerUnavailable as error:
            raise ValueError(str(error)) from error
        if answer.problem:
            raise ValueError(answer.problem)

    def _post(
        self, path: str, body: bytes, kind: type[Answer], num_videos: int | None = None
    ) -> Answer:
        """Return the first valid answer of a service."""
        problems = []
        for client in self._in_turn():
            try:
                # A busy service refuses here, before the videos are sent.
                _check_status(client.get("/health"))
                answer = kind.model_validate_json(
                    _check_status(client.post(path, content=body)).content, strict=True
                )
                if num_videos is not None and len(answer.scores) != num_videos:
                    raise ValueError(f"got scores of {len(answer.scores)} of {num_videos} videos")
                self._check_identity(answer.identity)
                return answer
            except RequestRejected:
                raise
            except (httpx.HTTPError, ValueError) as error:
                self._failed_at[client] = time.monotonic()
                problems.append(f"{client.base_url}: {describe_error(error)}")
        raise ScorerUnavailable(f"no reward service answered ({shorten('; '.join(problems))})")

    def _in_turn(self) -> list[httpx.Client]:
        """Return the services from the next one on; those that failed lately come last."""
        self._clients = [*self._clients[1:], self._clients[0]]
        now = time.monotonic()
        return sorted(self._clients, key=lambda client: now - self._failed_at[client] < COOLDOWN)

    def _check_identity(self, identity: str) -> None:
        """Remember the identity of the scorer in the first answer.

        Raises ValueError for an answer of another scorer: the rewards of a run must not change
        their meaning.
        """
        if self.identity and identity != self.identity:
            raise ValueError(
                "the service has another reward model than at the start of the run: another "
                "class, other options or other weights; start it with the earlier ones"
            )
        self.identity = identity


def _check_status(response: httpx.Response) -> httpx.Response:
    """Return an answer with status 200.

    Raises RequestRejected or ValueError for another status.
    """
    message = f"status {response.status_code}: {response.text[:500]}"
    if response.status_code in (413, 422):
        raise RequestRejected(f"the reward service rejects the request, {message}")
    if response.status_code != 200:
        raise ValueError(message)
    return response


def is_address(url: str) -> bool:
    """Return whether ``url`` is an http or https URL with a host, and without a password, which
    records and messages would show.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # an invalid port
        return False
    has_host = bool(parts.hostname) and " " not in url and port != 0
    return parts.scheme in ("http", "https") and has_host and parts.password is None
