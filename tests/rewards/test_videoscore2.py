"""VideoScore2 with a local server that reads requests and answers as vLLM does."""

import base64
import io
import math
import re
import threading
import time
from contextlib import contextmanager

import pytest
import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from PIL import Image
from pydantic import BaseModel, Field

from hyvideo.rewards.chat_endpoint import ChatEndpoint
from hyvideo.rewards.judge_answers import labelled
from hyvideo.rewards.rewards import make_scorer

MODEL = "VideoScore2"
MAX_LOGPROBS = 20  # vLLM's default
QUESTION = """
You are an expert for evaluating AI-generated videos from three dimensions:
(1) visual quality – clarity, smoothness, artifacts;
(2) text-to-video alignment – fidelity to the prompt;
(3) physical/common-sense consistency – naturalness and physics plausibility.

Video prompt: a {red} circle

Please output in this format:
visual quality: <v_score>;
text-to-video alignment: <t_score>,
physical/common-sense consistency: <p_score>
"""
REASONING = "<think>\nThe scores may be visual quality: 1, but the circle is sharp.\n</think>\n"
ANSWER = "visual quality: 4; \ntext-to-video alignment: 3, \nphysical/common-sense consistency: 5"
NUMBERED = (
    "(1) visual quality – clarity, smoothness, artifacts: 3\n"
    "(2) text-to-video alignment – fidelity to the prompt: 4\n"
    "(3) physical/common-sense consistency – naturalness and physics plausibility: 2"
)
LABELS = {
    "VisualQuality": "visual quality",
    "TextAlignment": "text[- ]to[- ]video alignment",
    "Physics": "physical(?: ?/ ?common-sense)? consistency",
}
# 33 frames at 8 per second, frame i with shade 7 i
VIDEO = torch.arange(33).view(33, 1, 1, 1).expand(33, 3, 16, 24).mul(7).to(torch.uint8)


class ChatRequest(BaseModel):
    """The fields of a chat completion that this server reads."""

    model: str
    messages: list[dict]
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    mm_processor_kwargs: dict = {}
    media_io_kwargs: dict[str, dict] = {}


def create_app(answers: list, seen: list) -> FastAPI:
    """Return a server that sends the ``answers`` in turn, repeating the last one.

    An answer is a text, whose digits after ``4?`` are uncertain, or a message. ``seen`` receives the
    requests, each with the shades of its frames.
    """
    app = FastAPI()

    @app.post("/v1/chat/completions", response_model=None)
    def complete(request: ChatRequest) -> dict | JSONResponse:
        if request.model != MODEL:
            message = f"The model `{request.model}` does not exist."
            error = {"message": message, "type": "NotFoundError", "code": 404}
            return JSONResponse({"error": error}, 404)
        (message,) = request.messages
        video, text = message["content"]
        assert (video["type"], text["type"]) == ("video_url", "text")
        head, _, frames = video["video_url"]["url"].partition(",")
        assert head == "data:video/jpeg;base64"
        pictures = [Image.open(io.BytesIO(base64.b64decode(each))) for each in frames.split(",")]
        shades = [round(picture.getpixel((5, 5))[0] / 7) for picture in pictures]
        seen.append((request, shades, text["text"]))
        answer = answers[min(len(seen), len(answers)) - 1]
        if isinstance(answer, dict):
            return {"choices": [{"index": 0, "finish_reason": "stop", "message": answer}]}
        tokens = re.findall(r"[0-9]|\s?[^\W\d]+|\s|[^\w\s]", answer)
        is_cut = len(tokens) > request.max_tokens
        tokens = tokens[: request.max_tokens]
        choice = {
            "index": 0,
            "finish_reason": "length" if is_cut else "stop",
            "message": {"role": "assistant", "content": "".join(tokens)},
            "logprobs": None,
        }
        if request.logprobs:
            choice["logprobs"] = {"content": list(map(alternatives, tokens))}
        return {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]}

    return app


def alternatives(token: str) -> dict:
    """Return a token with its alternatives: 4 has a share of 0.5, and other tokens are certain."""
    shares = {"4": {"4": 0.5, "5": 0.3, "3": 0.1, "x": 0.1}}.get(token, {token: 1.0})
    top = [
        {"token": each, "logprob": math.log(share), "bytes": list(each.encode())}
        for each, share in shares.items()
    ]
    return top[0] | {"top_logprobs": top}


@contextmanager
def serving(app: FastAPI):
    """Yield the address of a server in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join()


def ask(*answers, num_videos=1, model=MODEL, video=VIDEO, **options):
    """Return the results of videos with one prompt, and the requests that the server has seen."""
    seen = []
    with serving(create_app(list(answers), seen)) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatEndpoint, "backoff", 0.005)
        scorer = make_scorer(
            "videoscore2", "/nowhere", url=url, model=model, key_env="", parallel=1, **options
        )
        results = scorer.score([video] * num_videos, ["a {red} circle"] * num_videos, fps=8)
    return results, seen


EXPECTED_4 = (0.5 * 4 + 0.3 * 5 + 0.1 * 3) / 0.9  # the expected digit where 4 is likeliest


def test_the_request_is_that_of_the_model_card_with_one_video_of_two_frames_per_second():
    _, ((request, shades, text),) = ask(ANSWER)
    assert text == QUESTION
    # 33 frames of 8 per second are 4.1 seconds
    assert shades == [0, 5, 9, 14, 18, 23, 27, 32]
    assert request.mm_processor_kwargs == {"fps": 2}
    assert request.media_io_kwargs == {"video": {"fps": 2}}
    assert (request.temperature, request.seed, request.max_tokens) == (0.7, 0, 1024)


def test_a_number_of_frames_replaces_the_frames_per_second():
    _, ((_, shades, _),) = ask(ANSWER, num_frames=4)
    assert shades == [0, 11, 21, 32]


def test_scores_are_expected_digits_after_the_reasoning():
    (result,), _ = ask(REASONING + ANSWER)
    expected = {"VisualQuality": EXPECTED_4, "TextAlignment": 3, "Physics": 5}
    assert result.scores == pytest.approx(expected) and not result.reason


def test_the_usual_answer_with_descriptions_is_read():
    (result,), _ = ask(NUMBERED)
    expected = {"VisualQuality": 3, "TextAlignment": EXPECTED_4, "Physics": 2}
    assert result.scores == pytest.approx(expected)


REFUSAL = {"role": "assistant", "content": None, "refusal": "I cannot judge this video."}


@pytest.mark.parametrize(
    "answer, reason",
    [
        pytest.param(REFUSAL, "visual quality", id="refusal"),
        pytest.param("I'm sorry, I cannot judge this video.", "visual quality", id="apology"),
        pytest.param("Visual quality: 4. " + "It is sharp. " * 400, "length", id="cut"),
        pytest.param("<think>\n" + ANSWER, "think", id="reasoning without an end"),
        pytest.param("visual quality: 4; text-to-video alignment: 3", "physical", id="missing"),
    ],
)
def test_an_answer_without_three_digits_is_a_missing_score_of_this_video_only(answer, reason):
    (missing, following), _ = ask(answer, ANSWER, num_videos=2)
    assert missing.scores == {} and reason in missing.reason
    assert len(following.scores) == 3


def test_a_server_with_another_model_is_named():
    (result,), _ = ask(ANSWER, model="VideoScore")
    assert result.scores == {} and "`VideoScore` does not exist" in result.reason


def read(text, **choice):
    scores = labelled({"message": {"content": text}} | choice, LABELS)
    return tuple(scores.values())


@pytest.mark.parametrize(
    "text, digits",
    [
        (ANSWER, (4, 3, 5)),
        (NUMBERED, (3, 4, 2)),
        (ANSWER.replace("\n", ""), (4, 3, 5)),
        (
            "**Visual Quality:** 3\n**Text-to-Video Alignment**: 4\n"
            "**Physical/Common-sense Consistency:** 2",
            (3, 4, 2),
        ),
        (
            "Visual quality: 3/5; Text-to-video alignment: 3.0/5\nPhysical consistency: 2.0",
            (3, 3, 2),
        ),
        ("visual quality: 1\n" + ANSWER, (4, 3, 5)),
        ("</think>\n" + ANSWER + ".", (4, 3, 5)),
    ],
)
def test_digits_are_read_from_the_forms_that_the_model_writes(text, digits):
    assert read(text) == digits


@pytest.mark.parametrize(
    "first",
    ["7", "0", "35", "3.5", "4/10", "4-5", "4 / 50", "-3", "<v_score>", "good", "moderate (4)"],
)
def test_another_number_is_no_digit(first):
    with pytest.raises(ValueError, match="visual quality"):
        read(ANSWER.replace("4", first, 1))


def test_the_digit_of_another_label_is_not_taken():
    """Without a digit of its own, a label must not read that of the next one."""
    with pytest.raises(ValueError, match="visual quality"):
        read("visual quality looks good, text-to-video alignment: 3, physical consistency: 2")


def test_tokens_that_do_not_show_the_digit_give_the_stated_one():
    tokens = [alternatives(token) for token in ("visual quality: 4", ";", " other")]
    assert read(ANSWER, logprobs={"content": tokens}) == (4, 3, 5)
    assert read(ANSWER, logprobs={"content": [alternatives(ANSWER)]}) == (4, 3, 5)
