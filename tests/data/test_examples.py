"""CSV files of videos to train on: what is kept, and messages that name the row."""

from pathlib import Path

import pytest

from hyvideo.data.examples import read_examples
from hyvideo.settings.config import Config


@pytest.fixture
def write(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.mp4").write_bytes(b"")

    def write(*rows, columns="prompt,video,score,keep"):
        path = tmp_path / "videos.csv"
        path.write_text("\n".join([columns, *rows]))
        return [str(path)]

    return write


def kept(paths, fraction=1.0):
    return [example.videos[0].stem for example in read_examples(paths, fraction)]


def test_the_best_scores_of_each_prompt_are_kept_and_no_prompt_is_lost(write):
    rows = ["one,a.mp4,1,1", "one,b.mp4,3,1", "one,c.mp4,2,1", "two,d.mp4,0,1"]
    assert kept(write(*rows)) == ["a", "b", "c", "d"]
    assert kept(write(*rows), 0.5) == ["b", "c", "d"]
    assert kept(write(*rows), 0.1) == ["b", "d"]


def test_scores_stay_with_their_videos_where_others_are_dropped_and_over_two_files(tmp_path):
    """The best of a prompt are the best of both files; a dropped video does not count. Paths are
    relative to the folder of their file.
    """
    files = {
        "first": ["one,a.mp4,9,0", "one,b.mp4,1,1", "two,c.mp4,2,1"],
        "second": ["two,d.mp4,8,0", "one,e.mp4,3,1", "two,f.mp4,1,1", "one,g.mp4,0,1"],
    }
    paths = []
    for name, rows in files.items():
        (tmp_path / name).mkdir()
        for row in rows:
            (tmp_path / name / row.split(",")[1]).write_bytes(b"")
        paths.append(str(tmp_path / name / "videos.csv"))
        Path(paths[-1]).write_text("\n".join(["prompt,video,score,keep", *rows]))
    assert kept(paths) == ["b", "c", "e", "f", "g"]
    assert kept(paths, 0.5) == ["b", "c", "e"]
    assert kept(paths[::-1], 0.5) == ["e", "b", "c"]


def test_the_number_that_is_kept_is_not_raised_by_rounding(write):
    rows = [f"one,a.mp4,{score},1" for score in range(25)]
    assert len(read_examples(write(*rows), 0.28)) == 7


def test_videos_that_a_person_did_not_keep_are_dropped(write):
    assert kept(write("one,a.mp4,,1", "one,b.mp4,,0.0", "two,c.mp4,,1.0", "two,d.mp4,,")) == [
        "a",
        "c",
    ]
    with pytest.raises(ValueError, match="videos_csv .* `keep`"):
        kept(write("one,a.mp4,,0"))


@pytest.mark.parametrize(
    "row, name",
    [
        ("one,absent.mp4,1,1", "video .*absent.mp4.* row 1 of"),
        ("one,a.mp4,high,1", "score .*high.* row 1 of"),
        ("one,a.mp4,nan,1", "score .*nan.* row 1 of"),
        ("one,a.mp4,1,maybe", "keep .*maybe.* row 1 of"),
        (",a.mp4,1,1", "prompt.* row 1 of"),
    ],
)
def test_a_wrong_row_is_named(write, row, name):
    with pytest.raises(ValueError, match=name):
        kept(write(row))


def test_a_fraction_needs_scores_and_a_file_its_columns(write):
    assert kept(write("one,a.mp4", columns="Prompt,Video")) == ["a"]
    with pytest.raises(ValueError, match="keep_fraction 0.5 .*`score`"):
        kept(write("one,a.mp4", columns="prompt,video"), 0.5)
    with pytest.raises(ValueError, match="videos_csv .*video"):
        kept(write("one,a.mp4", columns="prompt,file"))


def test_the_folder_of_a_study_stands_for_its_answers(tmp_path, write):
    with pytest.raises(ValueError, match="pairs_csv .*pairs.csv.*scripts.rate"):
        Config.from_flat({"objective": "dpo", "pairs_csv": [str(tmp_path)]})
    (tmp_path / "pairs.csv").touch()
    config = Config.from_flat({"objective": "dpo", "pairs_csv": [str(tmp_path)]})
    assert config.objective.pairs_csv == [str(tmp_path / "pairs.csv")]
    write("one,a.mp4,1,1")
    assert kept([str(tmp_path)]) == ["a"]
