"""Client of an OpenAI-compatible endpoint: chat completions of limited size, retried and timed
out.
"""

import asyncio
import base64
import os
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import httpx
from httpx_retries import Retry, RetryTransport

from hyvideo.data.files import parse_json
from hyvideo.data.text import describe_error, quote, shorten
from hyvideo.rewards.service.client import MAX_ANSWER, is_address

T = TypeVar("T")

# endpoints on this machine
LOCAL = re.compile(r"https?://(localhost|127(\.[0-9]+){3}|\[::1\])(:[0-9]+)?(/|$)")
# raised for malformed answers
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
RETRIED = (408, 409, 429, 500, 502, 503, 504, 529)
MAX_CONNECT_S = 10.0
SECRET_LENGTH = 6  # shorter parts of a key occur in other words


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
        if not model or not is_address(url) or set("@?#") & set(url):
            raise ValueError(
                f"{user} needs a model and a url (https://HOST/v1, no key or query), got "
                f"{(model, url)}"
            )
        if not (0 < parallel <= 100 and min(timeout, retries + 1) > 0):
            raise ValueError(
                f"{user}: timeout must be positive, retries 0 or more, parallel 1 to 100, got "
                f"timeout {timeout}, retries {retries} and parallel {parallel}"
            )
        key = os.environ.get(key_env, "")
        is_safe = LOCAL.match(url) or not key_env or (key and url.startswith("https:"))
        if not is_safe or not re.fullmatch("[!-~]*", key):
            raise ValueError(
                f"{user} needs https and an ASCII key in environment variable {key_env}, or "
                f"key_env '' to send no key, got {quote(url)}"
            )
        self.url = f"{url.rstrip('/')}/chat/completions"
        self.model = model
        self._key = key
        self.parallel = parallel
        self.timeout = timeout
        self.retries = retries
        self.cost = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}

        # Printed at process exit, or when the endpoint is no longer used.
        def write(cost: dict[str, int]) -> None:
            print(
                f"{user} {model}:",
                ", ".join(f"{count:,} {name}" for name, count in cost.items()),
                file=sys.stderr,
            )

        weakref.finalize(self, write, self.cost)

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
                    self.cost["requests"] += 1
                    async with client.stream("POST", self.url, content=request()) as response:
                        answer = await _read_answer(response)
                if response.status_code != 200:
                    raise ValueError(
                        f"status {response.status_code}: {answer.decode(errors='replace')}"
                    )
                return read(self._choice(parse_json(answer))), ""
            except (TimeoutError, httpx.HTTPError, *MALFORMED) as error:
                return None, shorten(
                    without_key(f"{self.url}: {describe_error(error)}", self._key), 500
                )

        # An uncompressed answer is as long in memory as on the wire.
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        retry = Retry(
            self.retries,
            ["POST"],
            RETRIED,
            backoff_factor=self.backoff,
            max_backoff_wait=self.timeout,
        )
        transport = RetryTransport(
            httpx.AsyncHTTPTransport(verify=not self.url.startswith("http:")), retry
        )
        limits = httpx.Timeout(self.timeout, connect=min(self.timeout, MAX_CONNECT_S))
        async with httpx.AsyncClient(
            transport=transport, headers=headers, timeout=limits
        ) as client:
            return await asyncio.gather(*map(result, requests))

    def _choice(self, answer: dict) -> dict:
        """Return the first choice of a chat completion, and count its tokens."""
        for name in ("prompt_tokens", "completion_tokens"):
            count = usage.get(name) if isinstance(usage := answer.get("usage"), dict) else 0
            self.cost[name] += count if isinstance(count, int) else 0
        if "choices" not in answer or answer["choices"][0]["finish_reason"] not in self.ends:
            raise ValueError(
                f"finish_reason of a chat completion must be {' or '.join(self.ends)}, got "
                f"{answer!r}"
            )
        choice = answer["choices"][0]
        # the text of an answer may be stored, such as a prompt in a CSV file
        if len(self._key) >= SECRET_LENGTH and self._key in str(choice):
            raise ValueError("the answer repeats the API key")
        return choice


def without_key(text: str, key: str) -> str:
    """Return a message with ``***`` for every part of an API key of at least `SECRET_LENGTH`
    letters and digits.

    An endpoint may repeat the key in its answer: as it is, reversed, in base64 or hexadecimal, and
    with other characters in between.
    """
    if not key:
        return text
    text = text.replace(key, "***")  # also a key that is shorter than SECRET_LENGTH
    forms = [
        form
        for word in (key, key[::-1])
        for form in (word, word.encode().hex(), *_base64_forms(word))
    ]
    secrets = set()
    for form in forms:
        letters = "".join(filter(str.isalnum, form)).lower()
        secrets |= {letters[i : i + SECRET_LENGTH] for i in range(len(letters) - SECRET_LENGTH + 1)}
    places = [i for i, character in enumerate(text) if character.isalnum()]
    letters = "".join(text[i] for i in places).lower()
    hidden = set()
    for start in range(len(letters) - SECRET_LENGTH + 1):
        if letters[start : start + SECRET_LENGTH] in secrets:
            hidden.update(range(places[start], places[start + SECRET_LENGTH - 1] + 1))
    parts = []
    for i, character in enumerate(text):
        if i not in hidden:
            parts.append(character)
        elif i - 1 not in hidden:
            parts.append("***")
    return "".join(parts)


def _base64_forms(word: str) -> list[str]:
    """Return the base64 text of a word at the three positions that it can have in a longer text."""
    encoded = []
    for offset in range(3):
        text = base64.b64encode(b"\0" * offset + word.encode()).decode().rstrip("=")
        # the first and last characters also depend on the neighbors
        encoded.append(text[(0, 2, 3)[offset] : -1])
    return encoded


async def _read_answer(response: httpx.Response) -> bytes:
    """Return the body of an answer.

    Raises ValueError if it is compressed or longer than MAX_ANSWER.
    """
    answer, encoding = bytearray(), response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ValueError(
            f"the endpoint must send uncompressed answers, got content-encoding {encoding}"
        )
    async for part in response.aiter_raw():
        answer += part
        if len(answer) > MAX_ANSWER:
            raise ValueError(f"the answer is longer than {MAX_ANSWER} bytes")
    return bytes(answer)
