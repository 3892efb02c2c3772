"""Preparing the checks of prompts with a local endpoint: answers, repairs, resume, and the program."""

import csv
import json
import sys

import pytest

from hyvideo.data.prompts import read_requests
from hyvideo.models import prompt_checks
from hyvideo.models.prompt_checks import INSTRUCTION, NUM_REPAIRS, parse_checks, read_checks
from scripts import prepare_checks
from tests.models.chat_server import completion

CHECKS = [f"Is there a {word}?" for word in ("cat", "dog", "hat", "sun", "pan")]
GOOD = completion(json.dumps(CHECKS))


def asked(request):
    return request["messages"][1]["content"]


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    (tmp_path / "prompts.csv").write_text(
        'note,prompt,seed\nx,"a cat, and",1\ny,"a ""dog""\nnext line",2\nz,"a cat, and",3\n'
    )

    def run(server):
        paths = ["--prompts_csv", str(tmp_path / "prompts.csv"), "--out", str(tmp_path / "checks.csv")]
        monkeypatch.setattr(sys, "argv", ["prepare_checks", *paths, "--url", server.url, "--model", "m", "--key_env="])
        prepare_checks.main()
        return tmp_path / "checks.csv"

    return run


def test_the_output_is_a_prompts_csv_with_checks(prepare, endpoint, tmp_path):
    server = endpoint(
        lambda request, _: completion(
            f"<think>?</think>```json\n{json.dumps([asked(request)[:9] + c for c in CHECKS])}\n```"
        )
    )
    out = prepare(server)
    assert read_requests(out) == read_requests(tmp_path / "prompts.csv")
    assert [row["note"] for row in csv.DictReader(out.open())] == ["x", "y", "z"]
    found = read_checks(out)
    assert found == {p: [p[:9] + check for check in CHECKS] for p in ("a cat, and", 'a "dog"\nnext line')}
    assert len(server.requests) == 2, "equal prompts are asked once"
    assert server.requests[0]["messages"][0] == {"role": "system", "content": INSTRUCTION.read_text()}
    assert server.requests[0]["temperature"] == 0 and server.requests[0]["model"] == "m"


BAD = [
    "",
    "five questions",
    json.dumps(CHECKS[:4]),
    json.dumps([*CHECKS, "Is it?"]),
    json.dumps([*CHECKS[:4], CHECKS[0]]),
]
BAD += [
    json.dumps([*CHECKS[:4], "A pan."]),
    json.dumps([*CHECKS[:4], 5]),
    json.dumps(dict.fromkeys(CHECKS)),
    "5",
    "[" * 9999,
]


@pytest.mark.parametrize("text", BAD)
def test_anything_but_five_different_questions_is_rejected(text):
    with pytest.raises(ValueError, match="must be a JSON list of 5 different questions"):
        parse_checks(text)


def test_an_invalid_answer_is_repaired_a_limited_number_of_times(prepare, endpoint):
    server = endpoint(lambda request, _: GOOD if len(request["messages"]) == 2 + 2 * NUM_REPAIRS else completion("[1]"))
    assert read_checks(prepare(server))["a cat, and"] == CHECKS
    last = server.requests[-1]["messages"]
    assert len(server.requests) == 2 * (1 + NUM_REPAIRS) and last[2] == {"role": "assistant", "content": "[1]"}
    assert last[3]["role"] == "user" and "JSON list of 5 different questions, got '[1]'" in last[3]["content"]


def test_failures_are_reported_and_the_same_command_resumes(prepare, endpoint, capsys, monkeypatch):
    monkeypatch.setattr(prompt_checks, "ROWS_PER_WRITE", 1)
    server = endpoint(lambda request, _: completion("no") if "dog" in asked(request) else GOOD)
    with pytest.raises(SystemExit) as stopped:
        prepare(server)
    assert stopped.value.code == 2 and '1 of 3 prompts have no checks: \'a "dog"' in capsys.readouterr().err
    server = endpoint(GOOD)
    out = prepare(server)
    assert [asked(request) for request in server.requests] == ['a "dog"\nnext line'] and len(read_checks(out)) == 2


def test_other_prompts_in_the_output_are_an_error(prepare, endpoint, tmp_path, capsys):
    (tmp_path / "checks.csv").write_text("prompt,checks\nother,\n")
    with pytest.raises(SystemExit):
        prepare(endpoint(GOOD))
    assert "--output_path must be a new file or have the same prompts" in capsys.readouterr().err
    with pytest.raises(ValueError, match="5 different questions, got '' for 'other'"):
        read_checks(tmp_path / "checks.csv")
