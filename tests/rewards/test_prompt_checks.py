"""Preparing the checks of prompts with a local endpoint: answers, resume, and the program."""

import json
import sys
from dataclasses import replace

import pytest
from PIL import Image

from hyvideo.data.prompts import read_requests
from hyvideo.rewards import prompt_rewriting
from hyvideo.rewards.prompt_checks import INSTRUCTION, parse_checks, read_checks
from scripts import prepare_checks
from tests.rewards.chat_server import completion

CHECKS = [f"Is there a {word}?" for word in ("cat", "dog", "hat", "sun", "pan")]
GOOD = completion(json.dumps(CHECKS))


def asked(request):
    return request["messages"][1]["content"]


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    (tmp_path / "prompts.csv").write_text(
        'prompt,seed,ref_image_path\n"a cat, and",1,a.png\n"a ""dog""\nnext line",2,\n"a bird",3,\n'
    )
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")

    def run(server):
        paths = [
            "--prompts_csv",
            str(tmp_path / "prompts.csv"),
            "--output_path",
            str(tmp_path / "out" / "checks.csv"),
        ]
        monkeypatch.setattr(
            sys,
            "argv",
            ["prepare_checks", *paths, "--url", server.url, "--model", "m", "--key_env="],
        )
        prepare_checks.main()
        return tmp_path / "out" / "checks.csv"

    return run


def test_the_output_is_a_prompts_csv_with_checks(prepare, endpoint, tmp_path):
    server = endpoint(
        lambda request, _: completion(
            f"<think>?</think>```json\n{json.dumps([asked(request)[:9] + c for c in CHECKS])}\n```"
        )
    )
    out = prepare(server)
    given = read_requests(tmp_path / "prompts.csv")
    assert [replace(request, checks=None) for request in read_requests(out)] == given
    assert read_checks(out) == {r.prompt: [r.prompt[:9] + check for check in CHECKS] for r in given}
    assert server.requests[0]["messages"][0] == {
        "role": "system",
        "content": INSTRUCTION.read_text(),
    }
    assert server.requests[0]["model"] == "m"


BAD = [
    "",
    "five questions",
    "[]",
    json.dumps([f"Is it {number}?" for number in range(11)]),
    json.dumps([*CHECKS[:4], CHECKS[0]]),
]
BAD += [
    json.dumps([*CHECKS[:4], "A pan."]),
    json.dumps([*CHECKS[:4], 5]),
    json.dumps(dict.fromkeys(CHECKS)),
    "5",
    "[" * 9999,
    json.dumps([*CHECKS[:4], "Is it \ud800?"]),
    json.dumps([*CHECKS[:4], "Is it \0?"]),
]


@pytest.mark.parametrize("text", BAD)
def test_anything_but_different_questions_is_rejected(text):
    with pytest.raises(ValueError, match="must be a JSON list of 1 to 10 different questions"):
        parse_checks(text, "")


def test_failures_are_reported_and_the_same_command_resumes(prepare, endpoint, capsys, monkeypatch):
    monkeypatch.setattr(prompt_rewriting, "ROWS_PER_WRITE", 2)
    server = endpoint(lambda request, _: completion("no") if "dog" in asked(request) else GOOD)
    with pytest.raises(SystemExit) as stopped:
        prepare(server)
    assert (
        stopped.value.code == 2
        and '1 of 3 prompts failed: no valid answer for \'a "dog"' in capsys.readouterr().err
    )
    server = endpoint(GOOD)
    out = prepare(server)
    assert [asked(request) for request in server.requests] == ['a "dog"\nnext line'] and len(
        read_checks(out)
    ) == 3


def test_other_prompts_in_the_output_are_an_error(prepare, endpoint, tmp_path, capsys):
    out = tmp_path / "out" / "checks.csv"
    out.parent.mkdir()
    out.write_text("prompt,checks\nother,\n")
    with pytest.raises(SystemExit):
        prepare(endpoint(GOOD))
    assert "--output_path must be a new file or have the same prompts" in capsys.readouterr().err
    with pytest.raises(ValueError, match="different questions, got '' for 'other'"):
        read_checks(out)
