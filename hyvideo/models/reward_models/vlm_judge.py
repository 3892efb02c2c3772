"""VLM judge: a vision-language model behind an OpenAI-compatible endpoint that grades videos by a rubric.

    score_d = sum_k k p_k / sum_k p_k    k: 1..5; p_k: probability that the grade of dimension d is digit k

Without probabilities the score is the grade in the answer; an invalid answer is a missing reward. The prompt is
enclosed in delimiters that contain its SHA-256: no text can contain its own hash, so a prompt cannot close them, and
the same video and prompt give the same request on every rank and in every run.
"""

import base64
import hashlib
import io
import json
import math
import re
from functools import partial
from pathlib import Path

import jinja2
import torch
import yaml
from PIL import Image
from torch import Tensor

from hyvideo.data.outside import parse_json, quote
from hyvideo.data.videos import check_fps, check_video
from hyvideo.models.chat_endpoint import MALFORMED, ChatEndpoint
from hyvideo.models.reward_models.clip_metrics import frame_indices
from hyvideo.models.reward_models.rewards import Scorer, ScoreResult, Scores

RUBRIC = Path(__file__).with_suffix(".yaml")
REQUEST = jinja2.Template(RUBRIC.with_suffix(".jinja").read_text(), undefined=jinja2.StrictUndefined)


class VlmJudge(Scorer):
    """Scorer with grades from 1 to 5 in the dimensions of a rubric. Raises ValueError for invalid options."""

    noise = 1.0  # one grade: on most endpoints, rounding depends on the batch of concurrent requests

    def __init__(
        self,
        path: object = None,  # unused, like ``device``, because the judge has no local weights
        *,
        device: object = None,
        rubric: str = str(RUBRIC),
        num_frames: int = 8,
        url: str = "",  # this and the following are the options of `ChatEndpoint`
        model: str = "",
        key_env: str = "OPENAI_API_KEY",
        parallel: int = 8,
        timeout: int | float = 60,
        retries: int = 4,
    ):
        limits = {"parallel": parallel, "timeout": timeout, "retries": retries}
        self.endpoint = ChatEndpoint("vlm_judge", url=url, model=model, key_env=key_env, **limits)
        if num_frames < 1:
            raise ValueError(f"vlm_judge: num_frames must be positive, got {num_frames}")
        try:
            self.rubric = yaml.safe_load(Path(rubric).read_text(encoding="utf-8"))
            self.dimensions = tuple(self.rubric["dimensions"])
            if not all(re.fullmatch("[A-Za-z_]+", name) for name in self.dimensions or " "):
                raise ValueError("the name of a dimension must consist of letters and underscores")
            self.num_frames = num_frames
            self._request(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "", 1.0)
        except (OSError, yaml.YAMLError, RecursionError, jinja2.TemplateError, *MALFORMED) as error:
            raise ValueError(f"vlm_judge: rubric {quote(rubric)} must be like {RUBRIC.name}: {error!r}") from error

    def score(self, videos: list[Tensor], prompts: list[str], *, fps: float) -> list[ScoreResult]:
        """Return the scores of each video, or the reason why they are missing."""
        requests = [partial(self._request, video, prompt, fps) for video, prompt in zip(videos, prompts)]
        return [ScoreResult(scores or {}, reason) for scores, reason in self.endpoint.ask(requests, self._scores)]

    def _request(self, video: Tensor, prompt: str, fps: float) -> str:
        """Return the JSON of a request, with the task, the rubric, the frames and the prompt."""
        check_video(video), check_fps(fps)
        frames = []
        for frame in video[frame_indices(len(video), self.num_frames)].permute(0, 2, 3, 1).cpu().numpy():
            Image.fromarray(frame).save(file := io.BytesIO(), "jpeg", quality=95)
            frames.append(base64.b64encode(file.getvalue()).decode())
        mark = f"prompt-{hashlib.sha256(prompt.encode()).hexdigest()}"
        text = REQUEST.render(self.rubric, frames=frames, prompt=prompt, seconds=len(video) / fps, mark=mark)
        fields = json.loads(text) | {"model": self.endpoint.model} | self.rubric.get("request", {})
        return json.dumps({name: value for name, value in fields.items() if value is not None})

    def _scores(self, choice: dict) -> Scores:
        """Return the scores in a chat completion. Raises one of ``MALFORMED`` for an invalid answer."""
        message, logprobs = choice["message"], choice.get("logprobs") or {}
        text = (message["content"] or "").strip().removeprefix("```json").strip("`\n ")
        stated = parse_json(text) if text[:1] + text[-1:] == "{}" else {}
        if {*stated} != {*self.dimensions} or not all(type(k) is int and 1 <= k <= 5 for k in stated.values()):
            raise ValueError(
                f"an answer must have grades from 1 to 5 for exactly {', '.join(self.dimensions)}, got {message!r}"
            )
        return expected(stated, logprobs.get("content") or [])


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
