"""UnifiedReward-2.0 and yes/no checks with a local endpoint that answers like the recorded
formats.
"""

import base64
import csv
import io
import json
import math

import pytest
import torch
from PIL import Image

from hyvideo.rewards.rewards import make_scorer
from hyvideo.settings.config import Config
from hyvideo.training.rewards import make_async_scorer
from tests.rewards.chat_server import completion

CLIP = torch.arange(33).view(33, 1, 1, 1).expand(33, 3, 16, 24).mul(7).to(torch.uint8)
RECORDED = "Alignment Score (1-5): 2.4036\nPhysics Score (1-5): 3.0987\nStyle Score (1-5): 3.3889"
CHECKS = [f"Is part {number} of it there?" for number in range(1, 6)]


def preset(name, server, **options):
    return make_scorer(name, "/nowhere", url=server.url, model="a-model", key_env="", **options)


def score(name, server, prompt="a red circle", video=CLIP, **options):
    (result,) = preset(name, server, **options).score([video], [prompt], fps=8)
    return result


def content(request):
    """Return the numbers of the frames in a request, and its text."""
    (message,) = request["messages"]
    *images, text = message["content"]
    files = [
        base64.b64decode(image["image_url"]["url"].removeprefix("data:image/jpeg;base64,"))
        for image in images
    ]
    shades = [Image.open(io.BytesIO(file)).getpixel((5, 5))[0] / 7 for file in files]
    return [*map(round, shades)], text["text"]


def token(**shares):
    top = [
        {"token": name.replace("_", " "), "logprob": math.log(share)}
        for name, share in shares.items()
    ]
    return [{"token": top[0]["token"], "logprob": top[0]["logprob"], "top_logprobs": top}]


def yes(share):
    """Return a completion of one token, with the alternatives of a server that gives
    probabilities.
    """
    return completion(
        "Yes", end="length", tokens=token(Yes=0.9 * share, _no=0.9 * (1 - share) + 1e-9, Well=0.1)
    )


@pytest.fixture
def checks(tmp_path):
    with open(tmp_path / "checks.csv", "w", newline="") as file:
        csv.writer(file).writerows([["prompt", "checks"], ["a red circle", json.dumps(CHECKS)]])
    return str(tmp_path / "checks.csv")


# --- UnifiedReward-2.0 ----------------------------------------------------------------------------


def test_unified_reward_sends_16_frames_and_one_text_and_reads_the_recorded_answer(endpoint):
    server = endpoint(completion(RECORDED))
    result = score("unified_reward", server, prompt="a [red] {check} circle")
    assert (
        result.scores == {"Alignment": 2.4036, "Physics": 3.0987, "Style": 3.3889}
        and not result.reason
    )
    (request,) = server.requests
    frames, text = content(request)
    assert (
        frames
        == [int(i * 33 / 16) for i in range(16)]
        == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30]
    )
    assert text.endswith("Text Caption: [a [red] {check} circle]") and "{prompt}" not in text
    assert all(f"\n{name} Score (1-5): " in text for name in ("Alignment", "Physics", "Style"))
    assert (
        request.keys() == {"model", "messages", "temperature", "max_tokens"}
        and request["max_tokens"] == 4096
    )
    score("unified_reward", server, video=CLIP[:5])
    assert content(server.requests[1])[0] == [i * 5 // 16 for i in range(16)]


# --- yes/no checks --------------------------------------------------------------------------------


def test_the_score_is_the_mean_probability_of_yes_over_the_checks(endpoint, checks):
    shares = dict(zip(CHECKS, (0.9, 0.1, 0.5, 1.0, 0.75)))
    server = endpoint(
        lambda request, _: yes(
            next(p for check, p in shares.items() if check in content(request)[1])
        )
    )
    results = preset("yes_no", server, checks=checks).score(
        [CLIP, CLIP[:3]], ["a red circle"] * 2, fps=8
    )
    assert [result.scores for result in results] == [
        pytest.approx({"checks": sum(shares.values()) / 5})
    ] * 2
    assert len(server.requests) == 10
    # sent in any order
    request = max(server.requests, key=lambda request: len(content(request)[0]))
    fields = ("temperature", "max_tokens", "logprobs", "top_logprobs", "chat_template_kwargs")
    assert [request[name] for name in fields] == [0, 1, True, 20, {"enable_thinking": False}]
    frames, text = content(request)
    assert frames == [0, 5, 9, 14, 18, 23, 27, 32] and text.endswith(
        "\nAnswer with Yes or No only."
    )


@pytest.mark.parametrize(
    "answer, reason",
    [
        (
            completion("Well", end="length", tokens=token(Well=0.9, Hm=0.1)),
            "must be yes or no",
        ),
        (completion("Perhaps", end="length"), "must be yes or no"),
    ],
)
def test_another_answer_is_missing(endpoint, answer, reason):
    result = score("yes_no", endpoint(answer))
    assert result.scores == {} and reason in result.reason


@pytest.mark.parametrize("answer, expected", [("Yes", 1.0), ("no.", 0.0)])
def test_without_probabilities_the_stated_answer_counts(endpoint, answer, expected):
    assert score("yes_no", endpoint(completion(answer, end="length"))).scores == {
        "checks": expected
    }


def test_a_prompt_without_checks_is_rejected_before_a_run_if_there_is_a_file(endpoint, checks):
    server = endpoint(yes(1.0))
    scorer = preset("yes_no", server, checks=checks)
    scorer.check_prompts(["a red circle"])
    with pytest.raises(ValueError, match="a cat"):
        scorer.check_prompts(["a red circle", "a cat"])
    preset("yes_no", server).check_prompts(["a cat"])
    score("yes_no", server, prompt="a cat")
    assert 'Does the video show all of the following? "a cat"' in content(server.requests[0])[1]


def test_a_run_asks_the_checks_of_its_own_prompts(endpoint, checks, tmp_path):
    """A run with a column `checks`, but without the option, asked one general question."""
    server = endpoint(yes(1.0))
    options = {"yes_no": {"url": server.url, "model": "m", "key_env": ""}}
    config = Config.from_flat(
        {
            "prompts_csv": [checks],
            "valid_video_csv": [],
            "reward_model": ["yes_no"],
            "reward_config": json.dumps(options),
        }
    )
    scorer = make_async_scorer(config, torch.device("cpu"))
    assert scorer.scorers["yes_no"].checks == {"a red circle": CHECKS}
    (tmp_path / "without.csv").write_text("prompt\na cat\n")
    config = config.with_settings(valid_video_csv=[str(tmp_path / "without.csv")])
    scorer = make_async_scorer(config, torch.device("cpu"))
    with pytest.raises(ValueError, match="a cat"):
        scorer.check_prompts(["a red circle"], validated=["a cat"])
