"""VLM judge: a vision-language model behind an OpenAI-compatible endpoint that scores videos.

A YAML file defines the request, the dimensions and the kind of answer (`judge_answers`); each class
has its own. A file with a ``question`` sends the frames and this text. Otherwise the request is a
rubric, in which the prompt is enclosed in delimiters that contain its SHA-256: no text can contain
its own hash, so a prompt cannot close them. The same video and prompt give the same requests on
every rank and in every run. An invalid answer is a missing reward.
"""

import base64
import hashlib
import io
import json
import re
import statistics
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import jinja2
import torch
import yaml
from PIL import Image
from torch import Tensor

from hyvideo.data.video_files import check_fps
from hyvideo.data.videos import check_video
from hyvideo.files.text import quote
from hyvideo.rewards.chat_endpoint import MALFORMED, ChatEndpoint
from hyvideo.rewards.clip_metrics import NUM_FRAMES, frame_indices
from hyvideo.rewards.judge_answers import ANSWERS
from hyvideo.rewards.prompt_checks import read_checks
from hyvideo.rewards.qwen2_vl.preprocessing import frame_indices as frames_of_seconds
from hyvideo.rewards.rewards import Scorer, ScoreResult, Scores

RUBRIC = Path(__file__).with_suffix(".yaml")
REQUEST = jinja2.Template(
    RUBRIC.with_suffix(".jinja").read_text(), undefined=jinja2.StrictUndefined
)


class VlmJudge(Scorer):
    """Scorer with grades from 1 to 5 in the dimensions of a rubric.

    Raises ValueError for invalid options.
    """

    preset = "vlm_judge"  # name of the scorer and of its file

    def __init__(
        self,
        path: object = None,  # unused, like ``device``, because the judge has no local weights
        *,
        device: object = None,
        rubric: str = "",  # YAML file; default: the preset's
        num_frames: int | None = None,  # default: as the YAML file says
        # files of prompts with their checks, if the answers are yes or no
        checks: str | list = "",
        url: str = "",  # this and the following are the options of `ChatEndpoint`
        model: str = "",
        key_env: str = "OPENAI_API_KEY",
        parallel: int = 8,
        timeout: int | float = 60,
        retries: int = 4,
    ):
        self.endpoint = ChatEndpoint(
            self.preset,
            url=url,
            model=model,
            key_env=key_env,
            parallel=parallel,
            timeout=timeout,
            retries=retries,
        )
        own = RUBRIC.with_name(f"{self.preset}.yaml")
        rubric = rubric or str(own)
        self.checks = read_checks([checks] if isinstance(checks, str) else checks) if checks else {}
        try:
            self.rubric = yaml.safe_load(Path(rubric).read_text(encoding="utf-8"))
            self.dimensions = tuple(self.rubric["dimensions"])
            self.answer = self.rubric.get("answer", "grades")
            self.read = partial(ANSWERS[self.answer], dimensions=self.rubric["dimensions"])
            self.num_frames = num_frames
            if not num_frames and "fps" not in self.rubric:
                self.num_frames = int(self.rubric.get("num_frames", NUM_FRAMES))
            self._request(
                partial(self._frames, torch.zeros(2, 3, 8, 8, dtype=torch.uint8), 1.0),
                "",
                *self._checks(""),
            )
        except (OSError, yaml.YAMLError, RecursionError, jinja2.TemplateError, *MALFORMED) as error:
            raise ValueError(
                f"{self.preset}: rubric {quote(rubric)} must be like {own.name}: {error!r}"
            ) from error
        if checks and self.answer != "yes_no":
            raise ValueError(
                f"{self.preset} asks no checks, got checks {quote(checks)}; use the scorer yes_no"
            )
        if self.answer == "yes_no":
            self.endpoint.ends = ("stop", "length")  # an answer of one token ends with `length`

    def check_prompts(self, prompts: list[str]) -> None:
        """Raise ValueError if the file of checks has none for one of the prompts."""
        missing = [prompt for prompt in prompts if self.checks and prompt not in self.checks]
        if missing:
            raise ValueError(
                f"the file of checks lacks those of {len(missing)} of {len(prompts)} prompts, such "
                f"as {quote(missing[0])}; add them to its column checks"
            )

    def score(self, videos: list[Tensor], prompts: list[str], *, fps: float) -> list[ScoreResult]:
        """Return the scores of each video, means over its answers, or the reason why they are
        missing.
        """
        requests = []
        for video, prompt in zip(videos, prompts):
            checks = self._checks(prompt)
            frames = partial(self._frames, video, fps)
            if len(checks) > 1:
                frames = cache(frames)  # encoded once, for the first request
            requests += [partial(self._request, frames, prompt, check) for check in checks]
        answers = iter(self.endpoint.ask(requests, self.read))
        return [_mean([next(answers) for _ in self._checks(prompt)]) for prompt in prompts]

    def _checks(self, prompt: str) -> list[str]:
        """Return the check of each request for a video of the prompt."""
        if self.answer != "yes_no":
            return [""]
        return self.checks.get(prompt) or [self.rubric["check"].replace("{prompt}", prompt)]

    def _frames(self, video: Tensor, fps: float) -> tuple[list[str], float]:
        """Return JPEG files of the frames, in base64, and the seconds of the video."""
        check_video(video)
        check_fps(fps)
        encoded = []
        for frame in video[self._rows(len(video), fps)].permute(0, 2, 3, 1).cpu().numpy():
            file = io.BytesIO()
            Image.fromarray(frame).save(file, "jpeg", quality=95)
            encoded.append(base64.b64encode(file.getvalue()).decode())
        return encoded, len(video) / fps

    def _rows(self, num_frames: int, fps: float) -> list[int]:
        """Return the indices of the frames that are sent."""
        if "fps" in self.rubric:
            return frames_of_seconds(
                num_frames, fps, fps=self.rubric["fps"], num_sampled=self.num_frames
            )
        if self.rubric.get("frame_index") == "floor":
            return [i * num_frames // self.num_frames for i in range(self.num_frames)]
        return frame_indices(num_frames, self.num_frames)

    def _request(
        self, encoded: Callable[[], tuple[list[str], float]], prompt: str, check: str
    ) -> str:
        """Return the JSON of a request, with the task, the frames, the prompt and the check."""
        frames, seconds = encoded()
        if "question" in self.rubric:
            words = {"{prompt}": prompt, "{check}": check}
            text = re.sub(
                r"\{(prompt|check)\}", lambda match: words[match[0]], self.rubric["question"]
            )
            content = [*_media_parts(frames, self.rubric), {"type": "text", "text": text}]
            fields = {"messages": [{"role": "user", "content": content}]}
        else:
            mark = f"prompt-{hashlib.sha256(prompt.encode()).hexdigest()}"
            fields = json.loads(
                REQUEST.render(
                    self.rubric, frames=frames, prompt=prompt, seconds=seconds, mark=mark
                )
            )
        fields["model"] = self.endpoint.model
        fields.update(self.rubric.get("request", {}))
        return json.dumps({name: value for name, value in fields.items() if value is not None})


class UnifiedReward(VlmJudge):
    """Scorer of Alignment, Physics and Style from 1 to 5 by UnifiedReward-2.0."""

    preset = "unified_reward"


class VideoScore2(VlmJudge):
    """Scorer of VisualQuality, TextAlignment and Physics from 1 to 5 by VideoScore2."""

    preset = "videoscore2"


class YesNo(VlmJudge):
    """Scorer of the share of a prompt's checks that hold, by their probability."""

    preset = "yes_no"


def _media_parts(frames: list[str], rubric: dict) -> list[dict]:
    """Return the parts of a message with the frames: one video (``media: video``), or pictures."""
    if rubric.get("media") == "video":
        url = f"data:video/jpeg;base64,{','.join(frames)}"
        return [{"type": "video_url", "video_url": {"url": url}}]
    urls = [f"data:image/jpeg;base64,{frame}" for frame in frames]
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def _mean(answers: list[tuple[Scores | None, str]]) -> ScoreResult:
    """Return the mean scores of the answers about one video; they are missing if one answer is."""
    for scores, reason in answers:
        if scores is None:
            return ScoreResult({}, reason)
    return ScoreResult(
        {name: statistics.fmean(scores[name] for scores, _ in answers) for name in answers[0][0]},
        "",
    )
