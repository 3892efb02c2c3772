"""Tables that people bring: every form is read in the meaning that its writer gave it."""

import json

import pytest

from hyvideo.data.examples import read_examples
from hyvideo.data.prompts import read_requests
from hyvideo.files import text
from hyvideo.files.tables import csv_text, in_order, read_table

TWO = ["a red kite, over a beach", "a cat asleep"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a file; notes are printed again in each test."""
    monkeypatch.setattr("hyvideo.files.tables.note", text.note.__wrapped__)
    monkeypatch.setattr("hyvideo.data.pairs.note", text.note.__wrapped__)

    def write(name, content=""):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(content, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    "cell",
    [
        "'- a dash",
        "=HYPERLINK(1)",
        "'=a",
        "a line\x0band a page\x0c",
        "a next\x85line",
        "a cat\x07",
        "a, b",
        'a "word"',
        "一只猫",
    ],
)
def test_a_cell_is_read_as_it_was_written(tmp_path, cell):
    """Prompts from web pages have line tabulations and next lines; an apostrophe is an apostrophe."""
    path = tmp_path / "rows.csv"
    path.write_text(csv_text(["prompt", "score"], [[cell, -0.5], ["next", None]]))
    assert read_table(path, "a CSV").select("a CSV", ["prompt"], ["score"]) == [
        {"prompt": cell, "score": "-0.5"},
        {"prompt": "next", "score": ""},
    ]
    assert [request.prompt for request in read_requests(path)] == [cell.strip(), "next"]


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.txt", "\ufeffa red kite, over a beach\r\n\na cat asleep\n"),  # flow_grpo
        ("a.txt", 'prompt\n"a red kite, over a beach"\na cat asleep\n'),  # a CSV all the same
        ("a.jsonl", '{"prompt": "a red kite, over a beach"}\n{"prompt": "a cat asleep"}\n'),
        ("a.jsonl", "".join(json.dumps({"caption": p, "id": 1}) + "\n" for p in TWO)),
        ("a.json", json.dumps([{"text": prompt, "path": "x.mp4"} for prompt in TWO])),  # Open-Sora
        ("a.json", json.dumps([{"prompt_en": p, "dimension": ["color"]} for p in TWO])),  # VBench
        ("a.json", json.dumps(TWO, indent=1)),
        ("a.tsv", "Caption\tid\na red kite, over a beach\t1\na cat asleep\t2\n"),
        ("a.csv", "id;prompt\n1;a red kite, over a beach\n2;a cat asleep\n"),  # of a spreadsheet
        (
            "a.csv",
            'video,prompt\nx.mp4,"a red kite, over a beach"\ny.mp4,a cat asleep\n',
        ),  # DiffSynth
        ("a.csv", 'text,prompt\nother,"a red kite, over a beach"\nother,a cat asleep\n'),
        ("a/prompts.txt", "\n".join(TWO)),
    ],
)
def test_prompts_are_read_from_every_form(write, name, content):
    path = write(name, content)
    given = path.parent if name.startswith("a/") else path
    assert [request.prompt for request in read_requests(given)] == TWO


def test_cells_of_json_have_the_meaning_of_their_types(write):
    checks = ["Is it red?", "Does it fly?"]
    (request,) = read_requests(
        write("a.jsonl", json.dumps({"prompt": "a", "seed": 7, "checks": checks, "tag": None}))
    )
    assert request.seed == 7 and json.loads(request.checks) == checks


@pytest.mark.parametrize(
    "files",
    [
        {"metadata.csv": "video,prompt\nv/a.mp4,a\nv/b.mp4,b\n"},  # DiffSynth
        {"metadata.jsonl": '{"file_name": "v/a.mp4", "text": "a"}\n{"file_name": "v/b.mp4", "text": "b"}'},
        {"prompts.txt": "a\nb\n", "videos.txt": "v/a.mp4\nv/b.mp4\n"},  # finetrainers
        {"a.mp4": "", "b.MOV": "", "a.txt": "a\n", "b.txt": "b"},  # musubi-tuner, diffusion-pipe
    ],
)  # fmt: skip
def test_a_folder_of_videos_and_captions_is_a_table(write, tmp_path, files):
    for name in ("v/a.mp4", "v/b.mp4"):
        write(f"data/{name}")
    for name, content in files.items():
        write(f"data/{name}", content)
    found = read_examples([str(tmp_path / "data")], 1)
    assert [(each.request.prompt, each.videos[0].stem) for each in found] == [
        ("a", "a"),
        ("b", "b"),
    ]
    assert [request.prompt for request in read_requests(tmp_path / "data")] == ["a", "b"]


def test_paths_are_relative_to_the_table_or_to_the_working_directory(write, tmp_path, monkeypatch):
    """musubi's JSONL names videos from the working directory; a CSV may be from Windows."""
    monkeypatch.chdir(tmp_path)
    write("here/b.mp4")
    write("sets/videos/a.mp4")
    rows = [
        {"video_path": name, "caption": "a", "control_path": "c.mp4"}
        for name in ("videos\\a.mp4", "here/b.mp4")
    ]
    path = write("sets/list.jsonl", "\n".join(map(json.dumps, rows)))
    found = [example.videos[0].resolve() for example in read_examples([str(path)], 1)]
    assert found == [tmp_path / "sets/videos/a.mp4", tmp_path / "here/b.mp4"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.csv", "caption,text\na,b\n", "one column `prompt`.* caption, text"),
        ("a.csv", "prompt,Prompt\na,b\n", "one column `prompt`"),
        ("a.csv", "words\na\n", "a.csv lacks prompt, got words"),
        ("a.csv", 'prompt\n"a cat\na dog\n', "a.csv.* line 3"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b"\n', "a.jsonl.*text 2"),
        ("a.json", "[1, 2]", "a.json.* list of objects"),
        ("a.toml", "[[datasets]]", "a.toml.* JSONL"),  # of musubi-tuner
        ("a.parquet", "PAR1", "pandas"),
        ("a/b.mp4", "", "b.mp4|text file beside each video"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_a_way_out(
    write, tmp_path, name, content, message
):
    path = write(name, content)
    with pytest.raises(ValueError, match=message):
        read_requests(path.parent if name.startswith("a/") else path)


def test_a_file_in_another_encoding_is_named(tmp_path):
    """A spreadsheet saves "Unicode text" as UTF-16."""
    (tmp_path / "prompts.csv").write_text("prompt\né\n", encoding="utf-16")
    with pytest.raises(ValueError, match="prompts.csv.*UTF-8"):
        read_requests(tmp_path / "prompts.csv")


@pytest.mark.parametrize("name", ["", "missing.csv"])
def test_a_path_that_is_no_table_is_named(tmp_path, name):
    with pytest.raises(ValueError, match=str(tmp_path / name)):
        read_requests(tmp_path / name)


@pytest.mark.parametrize(
    "column, cell",
    [
        ("image_path", "cat.png"),  # DiffSynth, musubi-tuner
        ("image", "https://example.org/cat.png"),
        ("first_frame", ""),
        ("anything", "cat.png"),
        ("Ref Image Path", "x"),
        ("seeds", "7"),
    ],
)
def test_a_column_that_nearly_says_what_is_read_is_refused(write, column, cell):
    """A run with `image_path` trained text-to-video without a word."""
    write("cat.png")
    path = write("a.csv", f"prompt,{column}\na cat,{cell}\n")
    with pytest.raises(ValueError, match=f"`{column}` .* rename it to `(ref_image_path|seed)`"):
        read_requests(path)
    path = write("a.csv", f"prompt,ref_image_path,seed,{column}\na cat,,,{cell}\n")
    if cell == "cat.png":
        with pytest.raises(ValueError, match=f"`{column}` .* remove it"):
            read_requests(path)
    else:
        assert len(read_requests(path)) == 1


def test_other_columns_are_named_in_one_line(write, capfd):
    path = write("a.csv", "prompt,style,speed\na cat,photo,1\n")
    read_requests(path)
    assert "style, speed" in capfd.readouterr().err
    read_requests(write("b.csv", "prompt,seed\na cat,1\n"))
    assert not capfd.readouterr().err


def test_options_in_the_sample_prompts_of_other_trainers_are_named(write, capfd):
    """kohya's and musubi's lines end in options such as --w 640; a style such as --ar 16:9 is text."""
    read_requests(write("a.txt", "a cat --w 640 --h 480 --f 81\na dog\n"))
    assert "--w 640" in capfd.readouterr().err
    read_requests(write("b.txt", "a cat -- a dog\nwell-known -- yes\n"))
    assert not capfd.readouterr().err


def test_numbers_in_names_are_in_order():
    names = ["10.mp4", "2.mp4", "a10b2", "a2b10", "a2b9"]
    assert sorted(names, key=in_order) == ["2.mp4", "10.mp4", "a2b9", "a2b10", "a10b2"]
