"""Rated pairs: reading, selection, the split by prompt, and messages that name the row."""

import json
import re
import shutil
from pathlib import Path

import pytest

from hyvideo.data.examples import Example, check_videos
from hyvideo.data.pairs import TIE, read_ratings, select_preferences, split_by_prompt
from hyvideo.data.prompts import Request, check_images
from hyvideo.data.video_files import ClipForm
from tests.forked import ROOT
from tests.rated_pairs import PROMPTS, write_clip, write_pairs

SIZE = (5, 16, 16)
PROMPT = PROMPTS[0]
WITH_DIMENSION = ("prompt", "first", "second", "dimension", "answer", "rater")


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rated")
    write_pairs(folder)
    write_clip(folder / "long.mp4", 0, (9, 16, 16))
    write_clip(folder / "wide.mp4", 0, (5, 16, 32))
    (folder / "text.mp4").write_text("no video")
    return folder


def preferences(folder, rows, columns=("prompt", "first", "second", "answer"), weights=None):
    path = write_pairs(folder, rows, columns) if rows else folder / "pairs.csv"
    found = select_preferences(read_ratings(path), weights or {}, str(path))
    check_videos(found, ClipForm(*SIZE, 8, fit="none"))
    return found


def test_the_winner_is_the_preferred_video_and_ties_are_left_out(videos):
    rows = [
        (PROMPT, "0a.mp4", "0b.mp4", "first"),
        (PROMPT, "0a.mp4", "0b.mp4", "second"),
        (PROMPT, "0a.mp4", "0b.mp4", "tie"),
        (PROMPT, "0a.mp4", "0a.mp4", "both_bad"),
    ]
    found = preferences(videos, rows)
    assert [tuple(video.name for video in each.videos) for each in found] == [
        ("0a.mp4", "0b.mp4"),
        ("0b.mp4", "0a.mp4"),
    ]
    assert [each.weight for each in found] == [1.0, 1.0]
    assert found[1].request == Request(PROMPT) and found[1].place.startswith("row 2 of ")


def test_weights_select_and_weigh_the_dimensions(videos):
    rows = [(PROMPT, "0a.mp4", "0b.mp4", name, "first", "r01") for name in ("VQ", "MQ", "Overall")]
    assert len(preferences(videos, rows, WITH_DIMENSION)) == 3
    found = preferences(videos, rows, WITH_DIMENSION, {"VQ": 0.5, "Overall": 2, "MQ": 0})
    assert [each.weight for each in found] == [0.5, 2]
    # a rated dimension without a weight is left out, too
    assert preferences(videos, rows, WITH_DIMENSION, {"VQ": 0.5, "Overall": 2}) == found
    with pytest.raises(
        ValueError,
        match="pair_weights .*TA",
    ):
        preferences(videos, rows, WITH_DIMENSION, {"TA": 1})


@pytest.mark.parametrize(
    "row, message",
    [
        (
            (PROMPT, "0a.mp4", "gone.mp4", "first"),
            "second must be an existing video, .* got 'gone.mp4' in row 1 of ",
        ),
        (
            (PROMPT, "0a.mp4", "0b.mp4", "left"),
            "must be one of first, second, tie, both_bad, got 'left' in row 1 of .*; correct it",
        ),
        ((PROMPT, "0a.mp4", "wide.mp4", "second"), "got 256 x 512 in .*wide.mp4; .*row 1 of"),
    ],
)
def test_a_bad_row_is_one_message_that_names_it(videos, row, message):
    with pytest.raises(ValueError, match=message):
        preferences(videos, [row])


def test_a_first_frame_that_cannot_be_read_is_one_message_that_names_the_row(videos):
    (videos / "text.png").write_text("no image")
    shutil.copyfile(ROOT / "docs" / "study" / "figure4.png", videos / "frame.png")
    columns = ("prompt", "first", "second", "answer", "ref_image_path")
    row = (PROMPT, "0a.mp4", "0b.mp4", "first")
    found = preferences(videos, [(*row, "frame.png"), (*row, "text.png")], columns)
    check_images([found[0].request])
    with pytest.raises(ValueError, match="text.png.* in row 2 of "):
        check_images(example.request for example in found)


def test_fifteen_percent_of_the_prompts_are_held_out_with_all_their_pairs(tmp_path):
    pairs = [
        Example(Request(f"prompt {number % 20}"), (tmp_path / "a", tmp_path / "b"), "")
        for number in range(50)
    ]
    split = split_by_prompt(pairs, seed=0)
    prompts = [{pair.request.prompt for pair in part} for part in (split.train, split.held_out)]
    assert len(prompts[1]) == 3 and not prompts[0] & prompts[1]
    assert len(split.train) + len(split.held_out) == 50
    assert split == split_by_prompt(pairs, seed=0) != split_by_prompt(pairs, seed=1)
    assert not split_by_prompt(pairs[:1], seed=0).held_out
    assert len(split_by_prompt(pairs[:2], seed=0).held_out) == 1


MJ = {
    "caption": PROMPT,
    "video_0_path": "0a.mp4",
    "video_1_path": "0b.mp4",
    "overall_preference": "Video 2 Better",
    "category_preference": {"Alignment": "Video 1 better", "Bias": "Hard to judge", "Safety": None},
    "discard": False,
}
FORMS = {
    "VideoAlign": (
        "path_A,path_B,A_model,prompt,VQ,MQ,TA,fps_A\n"
        f"0a.mp4,0b.mp4,m1,{PROMPT},A,same,invalid,24.0\n0a.mp4,0b.mp4,m1,{PROMPT},B,A,,24.0\n",
        [("VQ", 0), ("MQ", TIE), ("VQ", 1), ("MQ", 0)],
    ),
    "VideoGen-RewardBench": (
        f"path_A,path_B,prompt,VQ,MQ,TA,Overall\n0a.mp4,0b.mp4,{PROMPT},A,B,B,B\n",
        [("VQ", 0), ("MQ", 1), ("TA", 1), ("Overall", 1)],
    ),
    "GenAI-Bench": (
        "prompt,left_model,left_video,right_model,right_video,vote_type\n"
        + "".join(
            f"{PROMPT},m1,0a.mp4,m2,0b.mp4,{vote}\n"
            for vote in ("leftvote", "rightvote", "tievote", "bothbad_vote")
        ),
        [("Overall", 0), ("Overall", 1), ("Overall", TIE), ("Overall", TIE)],
    ),
    "MJ-Bench-Video": (
        json.dumps([MJ, MJ | {"overall_preference": "Same", "category_preference": {}}])[:-1]
        + f", {json.dumps(MJ | {'discard': True})}]",
        [("Overall", 1), ("Alignment", 0), ("Overall", TIE)],
    ),
    "HPDv3": (
        json.dumps([{"prompt": PROMPT, "path1": "0a.mp4", "path2": "0b.mp4", "confidence": 0.98}]),
        [("Overall", 0)],
    ),
    "VideoDPO": (
        json.dumps(
            [
                {"video1": 0, "video2": 1, "label": 0, "frame_caption": PROMPT},
                {"video1": 0, "video2": 1, "label": 1, "frame_caption": PROMPT},
            ]
        ),
        [("Overall", 0), ("Overall", 1)],
    ),
    "Pick-a-Pic": (
        "caption,image_0_uid,image_1_uid,label_0,label_1,has_label,are_different,best_image_uid\n"
        f"{PROMPT},u0,u1,1.0,0.0,True,True,u0\n{PROMPT},u0,u1,0.5,0.5,True,True,tie\n"
        f"{PROMPT},u0,u1,0.0,1.0,True,True,u1\n{PROMPT},u0,u1,0.5,0.5,False,True,\n",
        [("Overall", 0), ("Overall", TIE), ("Overall", 1)],
    ),
    "chosen and rejected": (
        json.dumps({"prompt": PROMPT, "chosen": "0a.mp4", "rejected": "0b.mp4"}),
        [("Overall", 0)],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_public_forms_of_pairs_are_read_in_their_own_columns(videos, name):
    content, answers = FORMS[name]
    expected = (videos / "0a.mp4", videos / "0b.mp4")
    if name == "VideoDPO":
        listed = [{"video": each.name, "caption": PROMPT} for each in expected]
        (videos / "metadata.json").write_text(json.dumps(listed))
    if name == "Pick-a-Pic":
        expected = (videos / "u0.jpg", videos / "u1.jpg")
        for picture in expected:
            picture.touch()
    path = videos / ("public.json" if content[0] in "[{" else "public.csv")
    path.write_text(content)
    found = read_ratings(path)
    assert [(each.dimension, each.outcome) for each in found] == answers
    assert {each.videos for each in found} == {expected}
    assert {each.request.prompt for each in found} == {PROMPT}


def test_numbers_of_videodpo_without_a_list_are_winners_and_losers_in_turn(tmp_path):
    """The published archive has winvideos/ and losevideos/ and no metadata.json."""
    for name in ("winvideos/000003.mp4", "losevideos/000003.mp4"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    path = tmp_path / "pair.json"
    path.write_text(json.dumps([{"video1": 6, "video2": 7, "label": 0, "frame_caption": PROMPT}]))
    (found,) = read_ratings(path)
    assert [video.parent.name for video in found.videos] == ["winvideos", "losevideos"]
    assert found.outcome == 0


def test_public_pairs_without_their_answers_are_refused(videos):
    path = videos / "public.csv"
    path.write_text(f"path_A,path_B,prompt\n0a.mp4,0b.mp4,{PROMPT}\n")
    with pytest.raises(ValueError, match="one of the columns VQ, MQ, TA, Overall"):
        read_ratings(path)


def test_an_unknown_answer_of_a_public_form_is_named(videos):
    path = videos / "public.csv"
    path.write_text(
        f"path_A,path_B,prompt,VQ\n0a.mp4,0b.mp4,{PROMPT},A\n0a.mp4,0b.mp4,{PROMPT},C\n"
    )
    with pytest.raises(ValueError, match="one of a, b, same, invalid, got 'C' in row 2 of"):
        read_ratings(path)


def test_answers_that_are_no_json_are_named(videos):
    """A table that pandas has written has the cells of MJ-Bench-Video as Python prints them."""
    path = videos / "public.csv"
    columns = "caption,video_0_path,video_1_path,category_preference"
    path.write_text(f"{columns}\n{PROMPT},0a.mp4,0b.mp4,{{'Alignment': 'Same'}}\n")
    with pytest.raises(ValueError, match="category_preference must be .* in row 1 of"):
        read_ratings(path)


EXAMPLES = sorted(Path("tests/data/public_pairs").iterdir())  # in the form of the published files


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.stem for example in EXAMPLES])
def test_files_of_public_data_sets_are_read(tmp_path, example):
    content = example.read_text(encoding="utf-8")
    names = re.findall(r"[\w/]+\.(?:mp4|jpg)", content)
    names += [f"{uid}.jpg" for uid in re.findall(r"\bu\d\b", content)]
    names += [f"{kind}videos/{pair:06d}.mp4" for kind in ("win", "lose") for pair in range(3)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    path = tmp_path / f"pairs{example.suffix}"
    path.write_text(content)
    found = read_ratings(path)
    assert {rating.outcome for rating in found} - {TIE}
    assert len({rating.videos for rating in found}) >= 2
