"""Prompts that nobody meant, in files and flags: used, or refused in one message; nothing is written.

Inputs are drawn by hypothesis, the same ones every time.
"""

import csv
import io
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import generate
from hyvideo.data.outside import MAX_PROMPT_BYTES, text_problem
from hyvideo.data.prompts import Request, check_prompt, read_requests
from tests.refusals import LONGEST, ODD, contents, fuzzed, outcome

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of what is tried; the working directory is the project's."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "input").mkdir()
    return tmp_path / "input"


# --- CSV ----------------------------------------------------------------------------------------

CELL = st.one_of(
    st.text(st.characters(blacklist_categories=["Cs"]), max_size=20),
    st.sampled_from([*ODD, "../../etc/passwd", "a/b", "=1+1", "'; DROP", "%s%n", "${HOME}", "a red circle moves up"]),
)
HEADER = st.lists(st.sampled_from(["prompt", "ref_image_path", "id", "", "Prompt", " prompt"]), max_size=4)


@fuzzed(350)
@given(
    header=HEADER.map(lambda names: ["prompt", *names]),
    rows=st.lists(st.lists(CELL, min_size=1, max_size=3), min_size=20, max_size=40),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
)
def test_rows_are_read_as_written_or_refused(folder, header, rows, end, mark):  # 350 x at least 20 rows
    text = io.StringIO()
    csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([header, *rows])
    (folder / "prompts.csv").write_bytes(text.getvalue().encode("utf-8-sig" if mark else "utf-8"))
    requests, message = outcome(lambda: read_requests(folder / "prompts.csv"))
    assert contents(folder) == {str(folder), str(folder / "prompts.csv")}
    if message is None:
        written = [row[0].replace("\r\n", "\n").strip() for row in rows]
        assert [request.prompt for request in requests] == written
        assert not any(text_problem(prompt, MAX_PROMPT_BYTES) for prompt in written)


@fuzzed(200)
@given(
    prompts=st.lists(
        st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=30).map(str.strip).filter(bool),
        min_size=20,
        max_size=40,
    )
)
def test_sound_prompts_come_back_whatever_their_script(folder, prompts):  # 200 x at least 20 rows
    text = io.StringIO()
    csv.writer(text).writerows([["prompt"], *([prompt] for prompt in prompts)])
    (folder / "prompts.csv").write_text(text.getvalue(), encoding="utf-8", newline="")
    assert read_requests(folder / "prompts.csv") == [Request(prompt) for prompt in prompts]


@fuzzed(300)
@given(content=st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(b"prompt\n".__add__)))
def test_any_bytes_are_rows_or_refused(folder, content):
    (folder / "prompts.csv").write_bytes(content)
    outcome(lambda: read_requests(folder / "prompts.csv"))
    assert contents(folder) == {str(folder), str(folder / "prompts.csv")}


@pytest.mark.parametrize(
    "content, said",
    [
        ("prompt\na cat\x07\n", "of row 1 of .*: character 6 is the control character U\\+0007"),
        ("prompt\na\na\0cat\n", "of row 2 of .*U\\+0000"),
        (f"prompt\na\n{'x' * 100_001}\n", "of row 2 .* it has 100,001 bytes in UTF-8, and at most 100,000"),
        (f"prompt\n{'🐱' * 50_000}\n", "it has 200,000 bytes"),
        ('prompt\n"a cat\na dog\n', "unexpected end of data, line 3"),
        ("prompt,prompt\na,b\n", "must have one column `prompt`, got 2"),
        ("prompt\n" + "a," * 1000, "more cells than there are columns"),
        (f"{'x,' * 100_000}\n", "a column named `prompt`, got x, x,"),
    ],
)
def test_a_row_that_cannot_be_meant_is_named(folder, content, said):
    (folder / "prompts.csv").write_bytes(content.encode())
    with pytest.raises(ValueError, match=said) as error:
        read_requests(folder / "prompts.csv")
    assert len(str(error.value)) < 1_000


def test_a_prompt_of_the_longest_length_is_read(folder):
    (folder / "prompts.csv").write_text(f"prompt\n{'x' * MAX_PROMPT_BYTES}\n")
    assert len(read_requests(folder / "prompts.csv")[0].prompt) == MAX_PROMPT_BYTES


def test_line_ends_of_windows_within_quotes_are_line_breaks(folder):
    (folder / "prompts.csv").write_bytes(b'prompt\r\n"a cat\r\nand a dog"\r\n')
    assert read_requests(folder / "prompts.csv") == [Request("a cat\nand a dog")]


def test_a_hundred_thousand_rows_are_read_in_two_seconds(folder):
    rows = "".join(f'{i},"a ""cat"", number {i}, jumps over the grass"\n' for i in range(100_000))
    (folder / "prompts.csv").write_text("id,prompt\n" + rows)
    start = time.process_time()
    assert len(read_requests(folder / "prompts.csv")) == 100_000
    assert time.process_time() - start < 2


# --- prompts of generate.py ---------------------------------------------------------------------


def generate_outcome(monkeypatch, capsys, *flags):
    """Its message; a call that would make a video is stopped where the models are looked at."""
    monkeypatch.setattr(sys, "argv", ["generate.py", *flags])
    monkeypatch.setattr("hyvideo.evaluation.generation.generate", lambda *_, **__: None)
    try:
        code = generate.main()
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code in (0, 2) and "Traceback" not in said and len(said) <= LONGEST
    return code, said


@fuzzed(150)
@given(prompt=st.one_of(st.text(max_size=40), st.sampled_from([*ODD, "/", "../../x", "\udcff", "-", "x" * 200_000])))
def test_a_prompt_is_text_or_refused(folder, monkeypatch, capsys, prompt):
    before = contents(folder)
    code, said = generate_outcome(monkeypatch, capsys, f"--prompt={prompt}", "--output_path", str(folder / "videos"))
    is_sound = bool(prompt.strip()) and text_problem(prompt, MAX_PROMPT_BYTES) is None
    assert (code == 0) == is_sound, said
    assert is_sound or said.startswith("generate.py: a prompt must be text that people can read")
    assert contents(folder) == before


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--num_videos", "1000000000000"], "--num_videos must be a number from 1 to 100,000"),
        (["--height", "0", "--width", "16"], "--height must be a number from 1 to 8,192, got 0"),
        (["--lora_scale", "nan"], "--lora_scale must be a finite number"),
        (["--num_inference_steps", "0"], "validation_steps (given as --num_inference_steps) must be at least 1, got 0"),
        (["--guidance_scale", "inf"], "cfg_scale (given as --guidance_scale) must be a finite number"),
        (["--resolution", "480p", "--model_path", "assets/miniature", "--aspect_ratio", "9" * 400 + ":1"], "aspect"),
        (["--transformer_version", "../x", "--model_path", "assets"], "not a path"),
        (["--output_path", "a\0b"], "the output must be a folder"),
        (["--checkpoint_path", "x" * 300], "--checkpoint_path must be a path that can be read"),
        (["--seed", "9" * 100_000], "invalid int value"),
    ],
)
def test_flags_of_generate_that_cannot_be_meant_are_refused(folder, monkeypatch, capsys, flags, said):
    given_ = ["--output_path", str(folder / "videos"), *flags]
    code, message = generate_outcome(monkeypatch, capsys, "--prompt", "a red circle moves up", *given_)
    assert code == 2 and said in message and len(message) < 2_500
    assert contents(folder) == {str(folder)}


def test_the_message_of_a_prompt_says_which_one():
    with pytest.raises(ValueError, match="got 'a.x00b' as number 2 of --prompt: character 2 is the control character"):
        check_prompt("a\0b", "as number 2 of --prompt")
