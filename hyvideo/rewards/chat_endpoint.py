"""Client of an OpenAI-compatible endpoint: chat completions of limited size, retried and timed
out.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import httpx
from httpx_retries import Retry, RetryTransport

from hyvideo.files.text import describe_error, quote, shorten
from hyvideo.rewards.service.client import is_address, proxy_for

T = TypeVar("T")

# raised for malformed answers
# of answers in another form; a model that repeats [ without an end makes JSON too deep
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
RETRIED = (408, 409, 429, 500, 502, 503, 504, 529)
MAX_CONNECT_S = 10.0


def answer_text(choice: dict) -> str:
    """Return the text of a completion's choice without its reasoning.

    Raises ValueError if the reasoning has no end.
    """
    text = (choice["message"]["content"] or "").rpartition("</think>")[2].strip()
    if "<think>" in text:
        raise ValueError(f"an answer must end its <think>, got {quote(text)}; raise max_tokens")
    return text


class ChatEndpoint:
    """Endpoint that answers several requests at a time.

    Raises ValueError, naming ``user``, for invalid options.
    """

    ends = ("stop",)  # valid values of finish_reason
    # seconds before the first retry, at most doubled each time, or as long as the endpoint requests
    backoff = 1.0

    def __init__(
        self,
        user: str,
        *,
        url: str,  # such as https://api.openai.com/v1
        model: str,
        key_env: str,  # environment variable of the API key; "" sends none
        parallel: int,  # concurrent requests
        # maximum seconds without receiving a byte, and maximum pause before a retry
        timeout: int | float,
        retries: int,  # if there is no answer, or a status in ``RETRIED``
    ):
        if not model or not is_address(url):
            raise ValueError(
                f"{user} needs a model and a url (http://HOST:PORT/v1, no key), got {(model, url)}"
            )
        self.url = f"{url.rstrip('/')}/chat/completions"
        self.model = model
        self._key = os.environ.get(key_env, "")
        self.parallel = parallel
        self.timeout = timeout
        self.retries = retries

    def ask(
        self, requests: Sequence[Callable[[], str]], read: Callable[[dict], T]
    ) -> list[tuple[T | None, str]]:
        """Send requests, and return what ``read`` makes of each completion, or None with the reason
        of the failure.

        Each request is a function that returns JSON, so that at most ``parallel`` of them are in
        memory. ``read`` receives the completion's first choice and raises one of ``MALFORMED`` if
        it is invalid.
        """
        return asyncio.run(self._ask(requests, read))

    async def _ask(self, requests: Sequence[Callable[[], str]], read: Callable[[dict], T]):
        slots = asyncio.Semaphore(self.parallel)

        async def result(request: Callable[[], str]) -> tuple[T | None, str]:
            try:
                # for slowly arriving bytes
                async with slots, asyncio.timeout((self.retries + 1) * 2 * self.timeout):
                    response = await client.post(self.url, content=request())
                if response.status_code != 200:
                    raise ValueError(f"status {response.status_code}: {response.text}")
                return read(self._choice(response.json())), ""
            except (TimeoutError, httpx.HTTPError, *MALFORMED) as error:
                return None, shorten(f"{self.url}: {describe_error(error)}", 500)

        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        retry = Retry(
            self.retries,
            ["POST"],
            RETRIED,
            backoff_factor=self.backoff,
            max_backoff_wait=self.timeout,
        )
        # httpx does not read the environment's proxies for a transport of ours
        direct = httpx.AsyncHTTPTransport(proxy=proxy_for(self.url))
        transport = RetryTransport(transport=direct, retry=retry)
        limits = httpx.Timeout(self.timeout, connect=min(self.timeout, MAX_CONNECT_S))
        async with httpx.AsyncClient(
            transport=transport, headers=headers, timeout=limits
        ) as client:
            return await asyncio.gather(*map(result, requests))

    def _choice(self, answer: dict) -> dict:
        """Return the first choice of a chat completion. Raises ValueError if it has no end."""
        if "choices" not in answer or answer["choices"][0]["finish_reason"] not in self.ends:
            raise ValueError(
                f"finish_reason of a chat completion must be {' or '.join(self.ends)}, got "
                f"{answer!r}"
            )
        return answer["choices"][0]
