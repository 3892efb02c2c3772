"""The rating service over HTTP, in a browser, and after its process was killed."""

import json
import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from hyvideo.ratings.rating import Study, create_app
from tests import forked
from tests.chromium import start_chromium
from tests.ratings.conftest import METHODS, PROMPTS, add, content, waiting

ROOT = Path(__file__).parents[2]


@pytest.fixture
def client(study):
    return TestClient(create_app(study))


@pytest.fixture
def served(study):
    """Links of the raters of a study served by another process, and the process."""
    command = [
        forked.python(),
        "-m",
        "scripts.preference_study",
        "serve",
        str(study.folder),
        "--port",
        "0",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    yield [process.stdout.readline().split()[1] for _ in study.raters], process
    process.kill()
    process.wait()


@pytest.fixture
def browser():
    """A page of a real browser that records errors and warnings."""
    with start_chromium() as chromium:
        page = chromium.new_page()
        page.logged_errors = []
        page.on(
            "console",
            lambda log: (
                page.logged_errors.append(log.text) if log.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: page.logged_errors.append(str(error)))
        yield page


def token_and_pairs(study, number=0):
    token, rater = list(study.raters.items())[number]
    return token, list(rater["pairs"])


@pytest.fixture
def rater(study):
    return next(iter(study.raters))


def test_a_rater_resumes_at_the_first_pair_without_an_answer(study, rater):
    pairs = list(study.raters[rater]["pairs"])
    assert [pair["id"] for pair in waiting(study, rater)] == pairs and len(pairs) == 8
    add(study, rater, pairs[0], "tie")
    left = waiting(Study(study.folder), rater)
    assert [pair["id"] for pair in left] == pairs[1:]
    assert all(pair.keys() == {"id", "prompt"} and pair["prompt"] in PROMPTS for pair in left)


def test_invalid_answers_raise_value_error_and_are_not_stored(study, rater):
    pair, good = next(iter(study.raters[rater]["pairs"])), dict.fromkeys(study.questions, "tie")
    other_pair = next(iter(list(study.raters.values())[1]["pairs"]))
    wrong = [
        (rater, {other_pair: good}),
        ("nobody", {pair: good}),
        (None, {pair: good}),
        (rater, [pair]),
        (rater, None),
    ]
    wrong += [
        (rater, {pair: given})
        for given in (None, [], {}, good | {"VQ": "C"}, good | {"VQ": ["tie"]})
    ]
    wrong += [
        (rater, {pair: given})
        for given in (good | {"more": "tie"}, {"VQ": "tie"}, good | {"VQ": None})
    ]
    wrong += [
        (rater, {pair: good, other_pair: good}),
        (rater, {pair: good, "x": {}}),
        (rater, None),
    ]
    bodies = [json.dumps({"token": token, "answers": answers}).encode() for token, answers in wrong]
    for body in [
        *bodies,
        b"",
        b"{",
        b"[" * 9000,
        b"\xff\xfe",
        b"NaN",
        b"[]",
        b"null",
        b'{"token": "\\ud800"}',
    ]:
        with pytest.raises(ValueError):
            study.add(body)
    assert study.rows() == []


def test_an_answer_to_a_pair_is_stored_once(study, rater):
    saved = content(study, rater, "", "tie")
    saved["answers"] = {
        pair: dict.fromkeys(study.questions, "both_bad") for pair in study.raters[rater]["pairs"]
    }
    for _ in range(2):
        study.add(json.dumps(saved).encode())
    assert [(row["rater"], row["answer"]) for row in study.rows()] == [("r01", "both_bad")] * 4 * 8
    assert waiting(study, rater) == []


@pytest.mark.system
def test_served_content_does_not_reveal_the_method(study, client, folders):
    secrets = [
        *METHODS,
        *map(str, folders.values()),
        "clip_",
        "key.json",
        "methods",
    ]
    seen = []
    for token, rater in study.raters.items():
        replies = [client.get(f"/{token}/")]
        assert replies[0].headers["cache-control"] == "no-store"
        for pair in rater["pairs"]:
            clips = [
                client.get(f"/{token}/clips/{pair}-{side}.mp4") for side in ("first", "second")
            ]
            assert len({(clip.headers["last-modified"], clip.status_code) for clip in clips}) == 1
            assert [clip.headers["etag"] for clip in clips] == [
                f'"{pair}-first"',
                f'"{pair}-second"',
            ]
            replies += [
                *clips,
                client.post(f"/{token}/answers", json=content(study, token, pair, "tie")),
            ]
        assert {reply.status_code for reply in replies} == {200, 204}
        seen += [
            reply.content + repr(reply.headers).encode() + str(reply.url).encode()
            for reply in replies
        ]
        assert waiting(study, token) == []
    for file in seen:
        assert not [secret for secret in secrets if secret.encode() in file]


def test_tokens_give_access_to_the_raters_pairs_only(study, client):
    token, (mine, *_) = token_and_pairs(study)
    _, (theirs, *_) = token_and_pairs(study, 1)
    file = study.raters[token]["pairs"][mine]["first"]
    paths = [
        "/",
        "/x/",
        "/docs",
        "/openapi.json",
        "/key.json",
        f"/x/clips/{mine}-first.mp4",
        f"/videos/{file}",
    ]
    paths += [
        f"/{token}/{path}"
        for path in ("key.json", "../key.json", "..%2fkey.json", "clips/..%2f..%2fkey.json")
    ]
    paths += [
        f"/{token}/clips/{name}.mp4"
        for name in (f"{theirs}-first", f"{mine}-prompt", f"{mine}-", mine, "-")
    ]
    paths += [
        f"/{token}/clips/{file}",
        f"/{token}/clips/%00-first.mp4",
        f"/{token}/clips/{mine}-first.mp4%2f..%2f",
    ]
    for path in paths:
        reply = client.get(path)
        assert reply.status_code == 404, path
        assert file not in reply.text and len(reply.content) < 200


def test_answers_survive_a_killed_server(study, served):
    (link, *_), process = served
    token, (first, second, *_) = token_and_pairs(study)
    assert link.endswith(f"/{token}/") and link.startswith("http://127.0.0.1:")
    httpx.post(f"{link}answers", json=content(study, token, first, "first")).raise_for_status()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert [row["answer"] for row in Study(study.folder).rows()] == ["first"] * 4
    assert waiting(Study(study.folder), token)[0]["id"] == second


def wait_for_clips(page):
    """Wait until both videos play; return the difference of their times in seconds."""
    page.wait_for_timeout(100)
    for _ in range(100):
        state = page.evaluate(
            "[...document.querySelectorAll('video')].map(v => [v.readyState, v.paused, "
            "v.currentTime])"
        )
        if (
            all(ready >= 3 and not paused for ready, paused, _ in state)
            and max(t for *_, t in state) > 0.1
        ):
            return abs(state[0][2] - state[1][2])
        page.wait_for_timeout(50)
    raise AssertionError(f"the clips do not play: {state}")


@pytest.mark.system
def test_a_rater_answers_with_the_keyboard_and_resumes(study, served, browser):
    (link, *_), _ = served
    _, pairs = token_and_pairs(study)
    browser.goto(link)
    assert (
        "This study has 8 pairs of videos with 4 questions each, and takes about 4 minutes."
        in browser.inner_text("#start")
    )
    assert not browser.locator("#work").is_visible()
    browser.keyboard.press("a")  # before the start, keys answer nothing
    browser.keyboard.press("Enter")
    assert wait_for_clips(browser) < 0.2 and not browser.locator("#start").is_visible()
    keys = {"first": "a", "second": "b", "tie": "t", "both_bad": "x"}
    for place, chosen in enumerate(keys, start=1):
        browser.locator("#count", has_text=f"Pair {place} of 8").wait_for()
        browser.keyboard.press("Enter")
        assert browser.locator("#send").is_disabled()
        for key in (
            "x",
            "x",
            "ArrowUp",
            "ArrowUp",
            keys[chosen],
            "x",
            "t",
            "r",
            keys[chosen],
            "p",
            "p",
            "Enter",
        ):
            browser.keyboard.press(key)
    browser.locator("#count", has_text="Pair 5 of 8").wait_for()
    for pair, chosen in zip(pairs, keys):
        given = {row["dimension"]: row["answer"] for row in study.rows() if row["pair"] == pair}
        assert given == {"VQ": chosen, "MQ": "both_bad", "TA": "tie", "Overall": chosen}
    browser.reload()
    browser.locator("#count", has_text="Pair 5 of 8").wait_for()
    assert browser.title() == "Which video is better?"
    assert browser.locator("#prompt").text_content() in PROMPTS
    assert browser.logged_errors == []
