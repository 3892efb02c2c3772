"""Prompt rewriting with a local endpoint: requests, answers, failures, and CSV files for
training.
"""

import base64
import io
import json
from dataclasses import replace

import pytest
from PIL import Image

import generate
from hyvideo.data.prompts import Request, hash_requests, read_requests
from hyvideo.rewards import prompt_rewriting
from hyvideo.rewards.prompt_rewriting import INSTRUCTION, Rewriter
from tests.rewards.chat_server import completion

CAT, DOG = Request("a cat"), Request("a dog", seed=3)


def rewriter(server, **options):
    return Rewriter(**{"url": server.url, "model": "a-model", "key_env": ""} | options)


def asked(request):
    """Return the user's prompt in a request."""
    return request["messages"][1]["content"][-1]["text"]


def longer(request, _):
    return completion(f"{asked(request)}, in the rain")


def test_a_rewritten_prompt_keeps_the_original_one(endpoint):
    server = endpoint(longer)
    cat, dog, done = rewriter(server).write([CAT, DOG, Request("long", original_prompt="short")])
    assert cat == Request("a cat, in the rain", original_prompt="a cat")
    assert dog == Request("a dog, in the rain", seed=3, original_prompt="a dog")
    assert done == Request("long", original_prompt="short"), "rewritten twice"
    assert sorted(map(asked, server.requests)) == ["a cat", "a dog"]
    request = server.requests[0]
    assert (
        request["model"] == "a-model"
        and request["temperature"] == 0.1
        and request["max_tokens"] == 4096
    )
    assert request["messages"][0] == {"role": "system", "content": INSTRUCTION.read_text()}
    # as if it had been written
    assert hash_requests([cat]) == hash_requests([Request("a cat, in the rain")])


def test_an_image_is_sent_smaller_and_the_file_is_unchanged(endpoint, tmp_path):
    Image.new("RGB", (2048, 512), (200, 30, 40)).save(tmp_path / "cat.png")
    before = (tmp_path / "cat.png").read_bytes()
    server = endpoint(longer)
    (request,) = rewriter(server).write([Request("it jumps", str(tmp_path / "cat.png"))])
    assert request.prompt == "it jumps, in the rain" and request.image == str(tmp_path / "cat.png")
    image, _ = server.requests[0]["messages"][1]["content"]
    sent = Image.open(
        io.BytesIO(
            base64.b64decode(image["image_url"]["url"].removeprefix("data:image/jpeg;base64,"))
        )
    )
    assert sent.size == (1024, 256) and sent.getpixel((5, 5))[0] > 190
    assert (tmp_path / "cat.png").read_bytes() == before


@pytest.mark.parametrize(
    "answer, prompt",
    [
        ("<think>A cat, then.</think>\n\nA cat runs.\n", "A cat runs."),
        ('"A cat runs."', "A cat runs."),  # not text to render
        ('A sign says "OPEN"', 'A sign says "OPEN"'),
        ('"OPEN" and "SHUT"', '"OPEN" and "SHUT"'),
    ],
)
def test_reasoning_and_enclosing_quotes_are_removed(endpoint, answer, prompt):
    assert rewriter(endpoint(completion(answer))).write([CAT])[0].prompt == prompt


BAD = [
    (completion(""), "a prompt must have words"),
    (completion("<think>The user needs a cat"), "an answer must end its <think>"),
    (completion("cut", end="length"), "'finish_reason': 'length'"),
    ((401, {}, {}), "status 401"),
]


@pytest.mark.parametrize("answer, reason", BAD)
def test_a_failure_is_an_error_unless_the_user_allows_the_original_prompt(
    endpoint, capsys, answer, reason
):
    server = endpoint(
        lambda request, call: answer if asked(request) == "a cat" else longer(request, call)
    )
    with pytest.raises(ValueError, match="a cat.*option fallback") as e:
        rewriter(server).write([CAT, DOG])
    assert reason in str(e.value)
    cat, dog = rewriter(server, fallback=True).write([CAT, DOG])
    assert cat == CAT and dog.original_prompt == "a dog"
    assert "a cat" in capsys.readouterr().err


def test_a_csv_is_resumed_and_can_be_used_for_training(endpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_rewriting, "ROWS_PER_WRITE", 2)
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    given = [Request(f'clip, "{n}"\nnew line', seed=n) for n in range(4)] + [
        Request("x", str(tmp_path / "image.png"))
    ]
    out = tmp_path / "folder" / "out.csv"
    for failing, last in (
        (["2", "x"], False),
        (["2"], True),
    ):  # the second call does not stop at the row that fails again
        down = endpoint(
            lambda r, n, bad=failing: (400, {}, {}) if {*bad} & {*asked(r)} else longer(r, n)
        )
        with pytest.raises(ValueError, match=f"{2 - last} of 5 prompts"):
            rewriter(down, csv=out).write(given)
        assert [r.original_prompt is not None for r in read_requests(out)] == [
            True,
            True,
            False,
            True,
            last,
        ]
    assert "../image.png" in out.read_text()
    server = endpoint(longer)
    requests = rewriter(server, csv=out).write(given)
    assert len(server.requests) == 1, "only the missing row"
    assert requests == read_requests(out)
    assert [(r.original_prompt, r.image, r.seed) for r in requests] == [
        (r.prompt, r.image, r.seed) for r in given
    ]
    assert requests[2].prompt == 'clip, "2"\nnew line, in the rain'
    down = endpoint((400, {}, {}))
    with pytest.raises(ValueError, match="2 of 5 prompts"):
        rewriter(down, csv=tmp_path / "other.csv").write(given)
    assert len(down.requests) == 2, "stops if all rows of a part fail"
    for other in (given[1:], [replace(given[0], seed=9), *given[1:]]):
        with pytest.raises(ValueError, match=str(out)):
            rewriter(server, csv=out).write(other)


# --- generate.py ----------------------------------------------------------------------------------


def run(capsys, *flags):
    options = generate.parse([*map(str, flags)])
    try:
        generate.run(options)
    except ValueError as error:
        return str(error)
    return capsys.readouterr()


def test_a_flag_writes_a_csv_and_exits_without_a_model(endpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    (tmp_path / "in.csv").write_text("prompt,seed\na cat,7\n")
    server, out = endpoint(longer), tmp_path / "out.csv"
    options = {"url": server.url, "model": "m", "key_env": "", "csv": str(out)}
    run(capsys, "--valid_video_csv", tmp_path / "in.csv", "--rewrite", json.dumps(options))
    assert read_requests(out) == [Request("a cat, in the rain", seed=7, original_prompt="a cat")]
    assert "authorization" not in {name.lower() for name in server.headers[0]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv"]


def test_the_flag_of_the_original_alone_names_the_options(tmp_path, capsys):
    for value in ("true", "{}", '{"url": "x"', '{"url": "http://127.0.0.1:9/v1", "modle": "m"}'):
        assert "url" in run(capsys, "--prompt", "a cat", "--rewrite", value)
