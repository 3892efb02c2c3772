"""The page of a folder of generated videos, as text and in a browser."""

import json
import re
from html import unescape
from urllib.parse import unquote

import pytest

from hyvideo.report.gallery import write_gallery
from scripts import report
from tests.report.recorded_runs import HOSTILE


def write(folder, file, prompt, seed=3, clip=b"", **settings):
    folder.mkdir(exist_ok=True)
    (folder / f"{file}.mp4").write_bytes(clip)
    content = {
        "prompt": prompt,
        "image": None,
        "seed": seed,
        "number": 0,
        "steps": 4,
        "lora": None,
        **settings,
    }
    (folder / f"{file}.json").write_text(json.dumps(content))


@pytest.fixture
def folders(tmp_path):
    """Two folders: two prompts are in both, the first twice with one seed; a third is in one
    folder.
    """
    one, two = tmp_path / "one", tmp_path / "t w?o#"
    for folder, steps in ((one, 4), (two, 8)):
        write(folder, "0000", HOSTILE, steps=steps, height=32)
        write(folder, "0001", HOSTILE, steps=steps, height=64, number=1)
        write(folder, "0002", "a cat", seed=7, steps=steps, height=32)
    write(one, "0003", "a cat", seed=8)
    write(two, "0003", "a cat", seed=7, image="<i>.png")
    write(two, "0004", "a cat", seed=9)
    return one, two


def texts(pattern, text):
    """Return what a pattern finds, without tags."""
    return [
        unescape(re.sub("<[^>]*>", " ", found)).strip()
        for found in re.findall(pattern, text, re.DOTALL)
    ]


def cards(page):
    """Return prompt, links and the line below of each card."""
    articles = page.read_text(encoding="utf-8").split("<article>")[1:]
    patterns = "<h3>(.*?)</h3>", "<small>(.*?)</small>"
    lines = [[texts(pattern, article)[0] for pattern in patterns] for article in articles]
    return [
        (*line, re.findall('<video src="([^"]*)"', article))
        for line, article in zip(lines, articles)
    ]


def test_a_folder_shows_all_its_videos_and_what_varies_between_them(folders):
    (folders[0] / "0009.mp4").touch()  # written by another program
    (folders[0] / "0008.mp4").touch()
    (folders[0] / "0008.json").write_text("[")
    found = cards(write_gallery(folders[0]))
    assert [(prompt, links) for prompt, _, links in found] == [
        (HOSTILE, ["0000.mp4"]),
        (HOSTILE, ["0001.mp4"]),
        ("a cat", ["0002.mp4"]),
        ("a cat", ["0003.mp4"]),
    ]
    assert [line.split(", height ")[1] for _, line, _ in found] == ["32", "64", "32", "–"]
    assert found[1][1].startswith("seed 3, video 1") and "steps" not in found[1][1]
    assert HOSTILE not in (folders[0] / "index.html").read_text()


def test_two_folders_are_compared_by_prompt_image_and_seed(folders):
    one, two = folders
    page = write_gallery(one, two)
    linked = [[(one / unquote(link)).resolve() for link in links] for *_, links in cards(page)]
    assert linked == [
        *([one / f"000{number}.mp4", two / f"000{number}.mp4"] for number in range(3)),
        [one / "0003.mp4"],
        [two / "0003.mp4"],
        [two / "0004.mp4"],
    ]
    assert cards(page)[0][2] == ["0000.mp4", "../t%20w%3Fo%23/0000.mp4"]
    text = page.read_text(encoding="utf-8")
    assert text.count("no such video") == 3
    different = texts("<tr>.*?</tr>", text[: text.index("All settings")])
    assert "steps 4 8, 4" in [
        " ".join(row.split()) for row in different
    ] and "lora" not in " ".join(different)
    assert cards(page)[4][1] == "seed 7, video 0, image <i>.png"


def test_the_command_writes_the_page_or_names_the_folder_without_videos(
    folders, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr("sys.argv", ["report.py", "--videos", *map(str, folders)])
    report.main()
    assert str(folders[0] / "index.html") in capsys.readouterr().out
    given = ["--videos", str(folders[0])]
    for flags in (
        [*given, str(tmp_path)],
        [],
        ["run", "--videos", str(tmp_path)],
        [*given, "--output_path", "a.html"],
        [str(tmp_path), "--output_path", "metrics.jsonl"],  # would replace the records of a run
    ):
        monkeypatch.setattr("sys.argv", ["report.py", *flags])
        with pytest.raises(SystemExit):
            report.main()
    output = capsys.readouterr().err
    for named in (str(tmp_path), "--videos", "--output_path", "a.html", "metrics.jsonl"):
        assert named in output
