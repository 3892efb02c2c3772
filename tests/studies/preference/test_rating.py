"""The rating service over HTTP, in a browser, and after its process was killed."""

import asyncio
import json
import os
import signal
import socket
import sqlite3
import subprocess
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from studies.preference import rating
from studies.preference.rating import Study, create_app
from tests import forked
from tests.chromium import start_chromium
from tests.studies.preference.conftest import METHODS, PROMPTS, add, content, waiting

ROOT = Path(__file__).parents[3]


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


@pytest.mark.parametrize("content", [None, b""])
def test_a_study_without_one_of_its_videos_is_not_served(study, content):
    study.require_videos()
    video = min((study.folder / "videos").glob("*.mp4"))
    video.unlink()
    if content is not None:
        video.write_bytes(content)
    with pytest.raises(ValueError, match=f"{video.name}', which is missing or empty; restore it"):
        study.require_videos()


def test_a_rater_resumes_at_the_first_pair_without_an_answer(study, rater):
    pairs = list(study.raters[rater]["pairs"])
    assert [pair["id"] for pair in waiting(study, rater)] == pairs and len(pairs) == 12
    add(study, rater, pairs[0], "tie")
    left = waiting(Study(study.folder), rater)
    assert [pair["id"] for pair in left] == pairs[1:]
    assert all(pair.keys() == {"id", "prompt"} and pair["prompt"] in PROMPTS for pair in left)


def test_the_first_answer_to_a_pair_counts(study, rater):
    pair = next(iter(study.raters[rater]["pairs"]))
    for answer in ("first", "second"):
        add(study, rater, pair, answer)
    assert [row["answer"] for row in study.rows()] == ["first"] * 4


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


def test_answers_of_a_standalone_page_are_stored_once(study, rater):
    saved = content(study, rater, "", "tie")
    saved["answers"] = {
        pair: dict.fromkeys(study.questions, "both_bad") for pair in study.raters[rater]["pairs"]
    }
    for _ in range(2):
        study.add(json.dumps(saved).encode())
    assert [(row["rater"], row["answer"]) for row in study.rows()] == [("r01", "both_bad")] * 4 * 12
    assert waiting(study, rater) == []


@pytest.mark.system
def test_served_content_does_not_reveal_the_method(study, client, folders, tmp_path):
    secrets = [
        *METHODS,
        *map(str, folders.values()),
        "clip_",
        "key.json",
        '"identical"',
        '"repeat"',
        "methods",
    ]
    study.write_pages(tmp_path / "pages")
    seen = [
        path.read_bytes() + path.name.encode()
        for path in (tmp_path / "pages").rglob("*")
        if path.is_file()
    ]
    assert len(seen) == 4 * (1 + 2 * 12)
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


def test_a_missing_clip_is_reported_to_the_rater(study, client):
    token, (pair, *_) = token_and_pairs(study)
    (study.folder / study.raters[token]["pairs"][pair]["first"]).unlink()
    answer = client.get(f"/{token}/clips/{pair}-first.mp4")
    assert answer.status_code == 404 and "the clip is missing" in answer.text


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


def test_invalid_answers_are_rejected_over_http(study, client):
    token, (mine, *_) = token_and_pairs(study)
    good = content(study, token, mine, "tie")
    for given in (
        good | {"token": "x"},
        good | {"answers": {"x": good["answers"][mine]}},
        {},
        None,
    ):
        assert client.post(f"/{token}/answers", json=given).status_code == 422, given
    for body in (b"", b"{", b"\xff\xfe", b"[" * 9_000, b'"\\ud800"'):
        assert client.post(f"/{token}/answers", content=body).status_code in (413, 422), body[:20]
    assert client.post("/x/answers", json=good).status_code == 404
    for body in (b" " * 10_001, iter([b" "] * 10_001)):
        assert client.post(f"/{token}/answers", content=body).status_code == 413
    assert client.put(f"/{token}/answers").status_code == 405
    assert study.rows() == []


def test_a_full_disk_is_reported_to_the_rater(study, client):
    token, (mine, *_) = token_and_pairs(study)
    with sqlite3.connect(study.folder / "answers.sqlite") as database:
        database.execute(
            "CREATE TRIGGER full BEFORE INSERT ON answers BEGIN SELECT RAISE(ABORT, 'disk is "
            "full'); END"
        )
    reply = client.post(f"/{token}/answers", json=content(study, token, mine, "tie"))
    assert reply.status_code == 503
    assert reply.json()["detail"] == "disk is full; please contact the person who invited you"
    with sqlite3.connect(study.folder / "answers.sqlite") as database:
        database.execute("DROP TRIGGER full")
    assert (
        client.post(f"/{token}/answers", json=content(study, token, mine, "tie")).status_code == 204
    )
    assert len(study.rows()) == 4


def test_an_incomplete_answer_times_out(study, monkeypatch):
    monkeypatch.setattr(rating, "MAX_SECONDS", 0.1)
    token, _ = token_and_pairs(study)

    async def trickle():
        yield b"{"
        await asyncio.sleep(10)

    async def post():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(study))) as client:
            headers = {"content-length": "100"}
            return await client.post(
                f"http://x/{token}/answers", content=trickle(), headers=headers
            )

    assert asyncio.run(post()).status_code == 408


def test_answers_survive_a_killed_server(study, served):
    (link, *_), process = served
    token, (first, second, *_) = token_and_pairs(study)
    assert link.endswith(f"/{token}/") and link.startswith("http://127.0.0.1:")
    httpx.post(f"{link}answers", json=content(study, token, first, "first")).raise_for_status()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert [row["answer"] for row in Study(study.folder).rows()] == ["first"] * 4
    assert waiting(Study(study.folder), token)[0]["id"] == second


def test_a_too_large_body_is_rejected_before_it_is_read(study, served):
    (link, *_), _ = served
    url = httpx.URL(link)
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        head = (
            f"POST {url.path}answers HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {10**12}"
        )
        connection.sendall(f"{head}\r\n\r\n{{".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


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
        "This study has 12 pairs of videos with 4 questions each, and takes about 6 minutes."
        in browser.inner_text("#start")
    )
    assert not browser.locator("#work").is_visible()
    browser.keyboard.press("a")  # before the start, keys answer nothing
    browser.keyboard.press("Enter")
    assert wait_for_clips(browser) < 0.2 and not browser.locator("#start").is_visible()
    keys = {"first": "a", "second": "b", "tie": "t", "both_bad": "x"}
    for place, chosen in enumerate(keys, start=1):
        browser.locator("#count", has_text=f"Pair {place} of 12").wait_for()
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
    browser.locator("#count", has_text="Pair 5 of 12").wait_for()
    for pair, chosen in zip(pairs, keys):
        given = {row["dimension"]: row["answer"] for row in study.rows() if row["pair"] == pair}
        assert given == {"VQ": chosen, "MQ": "both_bad", "TA": "tie", "Overall": chosen}
    browser.reload()
    browser.locator("#count", has_text="Pair 5 of 12").wait_for()
    assert browser.title() == "Which video is better?"
    assert browser.locator("#prompt").text_content() in PROMPTS
    assert browser.logged_errors == []


@pytest.mark.slow
def test_a_standalone_page_saves_answers(study, browser, tmp_path):
    study.write_pages(tmp_path / "pages")
    browser.goto((tmp_path / "pages/r01/index.html").as_uri())
    browser.locator("#begin").click()
    wait_for_clips(browser)
    for _ in range(11):
        browser.keyboard.type("abtx")
        browser.keyboard.press("Enter")
    browser.reload()
    browser.locator("#count", has_text="Pair 12 of 12").wait_for()
    with browser.expect_download() as saved:
        browser.keyboard.type("abtx")
        browser.keyboard.press("Enter")
    saved.value.save_as(tmp_path / "answers.json")
    study.add((tmp_path / "answers.json").read_bytes())
    assert [row["answer"] for row in study.rows()] == ["first", "second", "tie", "both_bad"] * 12
    assert {row["rater"] for row in study.rows()} == {"r01"}
    assert browser.locator("#end").is_visible() and browser.logged_errors == []
    assert json.loads((tmp_path / "answers.json").read_text()).keys() == {"token", "answers"}


def delete(path):
    path.unlink()


def replace_by_a_copy(path):
    path.with_name("copy").write_bytes(path.read_bytes())
    path.with_name("copy").replace(path)


def truncate(path):
    os.truncate(path, 0)


def move_the_folder(path):
    path.parent.rename(path.parent.with_name("moved"))


@pytest.mark.parametrize("change", [delete, replace_by_a_copy, truncate, move_the_folder])
def test_an_answer_is_not_accepted_into_a_database_that_is_gone(study, client, change):
    token, pairs = token_and_pairs(study)
    assert (
        client.post(f"/{token}/answers", json=content(study, token, pairs[0], "tie")).status_code
        == 204
    )
    change(study.folder / "answers.sqlite")
    reply = client.post(f"/{token}/answers", json=content(study, token, pairs[1], "tie"))
    assert reply.status_code == 503 and "please contact the person who invited you" in reply.text


@pytest.mark.parametrize(
    "change",
    [
        lambda one, two: one.pop("name"),
        lambda one, two: one.pop("pairs"),
        lambda one, two: one.update(name=two["name"]),
        lambda one, two: two["pairs"].update(one["pairs"]),
        lambda one, two: next(iter(one["pairs"].values())).pop("first"),
        lambda one, two: next(iter(one["pairs"].values())).update(prompt=None),
    ],
)
def test_a_study_with_an_invalid_rater_raises_value_error(study, change):
    content = json.loads((study.folder / "study.json").read_text())
    change(*list(content["raters"].values())[:2])
    (study.folder / "study.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="study.json must have the format that `make` writes"):
        Study(study.folder)


def test_a_cut_file_of_answers_is_one_sentence(study):
    token, rater = next(iter(study.raters.items()))
    whole = json.dumps(content(study, token, next(iter(rater["pairs"])), "tie")).encode()
    with pytest.raises(ValueError) as raised:
        study.add(whole[:-9])
    assert "answers" in str(raised.value) and len(str(raised.value).splitlines()) == 1
    study.add(whole)
