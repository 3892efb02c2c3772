"""VLM judge: a vision-language model behind an OpenAI-compatible endpoint that grades videos by a rubric.

    score_d = sum_k k p_k / sum_k p_k    k: 1..5; p_k: probability that the grade of dimension d is digit k

Without probabilities the score is the grade in the answer; an invalid answer is a missing reward. The prompt is
enclosed in delimiters that contain its SHA-256: no text can contain its own hash, so a prompt cannot close them, and
the same video and prompt give the same request on every rank and in every run.
"""

import asyncio
import base64
import hashlib
import io
import json
import math
import os
import re
import sys
import weakref
from pathlib import Path

import httpx
import jinja2
import torch
import yaml
from httpx_retries import Retry, RetryTransport
from PIL import Image
from torch import Tensor

from hyvideo.data.outside import describe_error, parse_json, quote, shorten
from hyvideo.data.videos import check_fps, check_video
from hyvideo.models.reward_models.clip_metrics import frame_indices
from hyvideo.models.reward_models.rewards import Scorer, ScoreResult, Scores
from hyvideo.models.reward_models.service.client import MAX_ANSWER, is_address

RUBRIC = Path(__file__).with_suffix(".yaml")
REQUEST = jinja2.Template(RUBRIC.with_suffix(".jinja").read_text(), undefined=jinja2.StrictUndefined)
LOCAL = re.compile(r"https?://(localhost|127(\.[0-9]+){3}|\[::1\])(:[0-9]+)?(/|$)")  # endpoints on this machine
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError)  # raised for malformed answers
RETRIED = (408, 409, 429, 500, 502, 503, 504, 529)


class VlmJudge(Scorer):
    """Scorer with grades from 1 to 5 in the dimensions of a rubric. Raises ValueError for invalid options."""

    noise = 1.0  # one grade: on most endpoints, rounding depends on the batch of concurrent requests
    backoff = 1.0  # seconds before the first retry, at most doubled each time, or as long as the endpoint requests

    def __init__(
        self,
        path: object = None,  # unused, like ``device``, because the judge has no local weights
        *,
        device: object = None,
        url: str = "",  # such as https://api.openai.com/v1
        model: str = "",
        rubric: str = str(RUBRIC),
        key_env: str = "OPENAI_API_KEY",  # environment variable of the API key; "" sends none
        num_frames: int = 8,
        parallel: int = 8,  # concurrent requests per process
        timeout: int | float = 60,  # maximum seconds without receiving a byte, and maximum pause before a retry
        retries: int = 4,  # if there is no answer, or a status in ``RETRIED``
    ):
        if not model or not is_address(url) or set("@?#") & set(url):
            raise ValueError(f"vlm_judge needs a model and a url (https://HOST/v1, no key or query), got {quote(url)}")
        if not (0 < parallel <= 100 and min(num_frames, timeout, retries + 1) > 0):
            raise ValueError("vlm_judge: num_frames and timeout must be positive, retries 0 or more, parallel 1 to 100")
        key = os.environ.get(key_env, "")
        is_safe = LOCAL.match(url) or not key_env or (key and url.startswith("https:"))
        if not is_safe or not re.fullmatch("[!-~]*", key):
            needed = f"https and an ASCII key in environment variable {key_env}, or key_env '' to send no key"
            raise ValueError(f"vlm_judge needs {needed}, got {quote(url)}")
        try:
            self.rubric = yaml.safe_load(Path(rubric).read_text(encoding="utf-8"))
            self.dimensions = tuple(self.rubric["dimensions"])
            if not all(re.fullmatch("[A-Za-z_]+", name) for name in self.dimensions or " "):
                raise ValueError("the name of a dimension must consist of letters and underscores")
            self.model, self.num_frames, self.parallel = model, num_frames, parallel
            self._request(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "", 1.0)
        except (OSError, yaml.YAMLError, RecursionError, jinja2.TemplateError, *MALFORMED) as error:
            raise ValueError(f"vlm_judge: rubric {quote(rubric)} must be like {RUBRIC.name}: {error!r}") from error
        self.url, self._key, self.timeout, self.retries = f"{url.rstrip('/')}/chat/completions", key, timeout, retries
        self.cost = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}
        weakref.finalize(self, print, f"vlm_judge {model}:", self.cost, file=sys.stderr)  # printed at process exit

    def score(self, videos: list[Tensor], prompts: list[str], *, fps: float) -> list[ScoreResult]:
        """Return the scores of each video, or the reason why they are missing."""
        return asyncio.run(self._results(videos, prompts, fps))

    async def _results(self, videos: list[Tensor], prompts: list[str], fps: float) -> list[ScoreResult]:
        slots = asyncio.Semaphore(self.parallel)

        async def result(video: Tensor, prompt: str) -> ScoreResult:
            try:
                async with slots, asyncio.timeout((self.retries + 1) * 2 * self.timeout):  # for slowly arriving bytes
                    self.cost["requests"] += 1
                    request = self._request(video, prompt, fps)
                    async with client.stream("POST", self.url, content=request) as response:
                        answer = await _read_answer(response)
                if response.status_code != 200:
                    raise ValueError(f"status {response.status_code}: {answer.decode(errors='replace')}")
                return ScoreResult(self._scores(parse_json(answer)))
            except (TimeoutError, httpx.HTTPError, *MALFORMED) as error:
                return ScoreResult({}, shorten(describe_error(error).replace(self._key or "\0", "***"), 500))

        # An uncompressed answer is as long in memory as on the wire.
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        headers |= {"authorization": f"Bearer {self._key}"} if self._key else {}
        retry = Retry(self.retries, ["POST"], RETRIED, backoff_factor=self.backoff, max_backoff_wait=self.timeout)
        transport = RetryTransport(httpx.AsyncHTTPTransport(verify=not self.url.startswith("http:")), retry)
        async with httpx.AsyncClient(transport=transport, headers=headers, timeout=self.timeout) as client:
            return await asyncio.gather(*map(result, videos, prompts))

    def _request(self, video: Tensor, prompt: str, fps: float) -> str:
        """Return the JSON of a request, with the task, the rubric, the frames and the prompt."""
        check_video(video), check_fps(fps)
        frames = []
        for frame in video[frame_indices(len(video), self.num_frames)].permute(0, 2, 3, 1).cpu().numpy():
            Image.fromarray(frame).save(file := io.BytesIO(), "jpeg", quality=95)
            frames.append(base64.b64encode(file.getvalue()).decode())
        mark = f"prompt-{hashlib.sha256(prompt.encode()).hexdigest()}"
        text = REQUEST.render(self.rubric, frames=frames, prompt=prompt, seconds=len(video) / fps, mark=mark)
        fields = json.loads(text) | {"model": self.model} | self.rubric.get("request", {})
        return json.dumps({name: value for name, value in fields.items() if value is not None})

    def _scores(self, answer: dict) -> Scores:
        """Return the scores in a chat completion. Raises one of ``MALFORMED`` for an invalid answer."""
        for name in ("prompt_tokens", "completion_tokens"):
            count = usage.get(name) if isinstance(usage := answer.get("usage"), dict) else 0
            self.cost[name] += count if isinstance(count, int) else 0
        if "choices" not in answer or answer["choices"][0]["finish_reason"] != "stop":
            raise ValueError(f"finish_reason of a chat completion must be 'stop', got {answer!r}")
        message, logprobs = answer["choices"][0]["message"], answer["choices"][0].get("logprobs") or {}
        text = (message["content"] or "").strip().removeprefix("```json").strip("`\n ")
        stated = parse_json(text) if text[:1] + text[-1:] == "{}" else {}
        if {*stated} != {*self.dimensions} or not all(type(k) is int and 1 <= k <= 5 for k in stated.values()):
            raise ValueError(
                f"an answer must have grades from 1 to 5 for exactly {', '.join(self.dimensions)}, got {message!r}"
            )
        return expected(stated, logprobs.get("content") or [])


async def _read_answer(response: httpx.Response) -> bytes:
    """Return the body of an answer. Raises ValueError if it is compressed or longer than MAX_ANSWER."""
    answer, encoding = bytearray(), response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ValueError(f"the endpoint must send uncompressed answers, got content-encoding {encoding}")
    async for part in response.aiter_raw():
        answer += part
        if len(answer) > MAX_ANSWER:
            raise ValueError(f"the answer is longer than {MAX_ANSWER} bytes")
    return bytes(answer)


def expected(stated: Scores, tokens: list[dict]) -> Scores:
    """Return each grade's expectation over the token's alternatives; the stated grade if the tokens do not match it."""
    digits = [token for token in tokens if re.fullmatch(r"\s*[1-5]\s*", token["token"])]
    if [int(token["token"]) for token in digits] != [*stated.values()]:
        digits = [{}] * len(stated)
    scores = {}
    for (name, grade), token in zip(stated.items(), digits):
        shares = dict.fromkeys("12345", 0.0)
        for alternative in token.get("top_logprobs") or []:
            if (digit := alternative["token"].strip()) in shares:
                shares[digit] += math.exp(alternative["logprob"])
        total = sum(shares.values())
        scores[name] = sum(int(k) * share for k, share in shares.items()) / total if total > 0 else float(grade)
    return scores
