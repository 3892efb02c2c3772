"""scripts.rate: pairs and single videos over HTTP, what a repeated command does, and wrong flags."""

import csv
import json
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from hyvideo.data.examples import read_examples
from hyvideo.data.pairs import read_ratings
from hyvideo.data.video_files import ClipForm, read_header
from hyvideo.data.videos import read_clip, read_video, write_video
from hyvideo.ratings import own_videos
from hyvideo.ratings.own_videos import RatingPlan, clips_to_rate
from scripts import rate
from tests import forked
from tests.chromium import start_chromium
from tests.ratings.conftest import write_folder

ROOT = Path(__file__).parents[2]
PROMPTS = ["a red circle", "a blue square"]


@pytest.fixture
def videos(tmp_path):
    """A folder with two videos of each prompt."""
    return write_folder(tmp_path / "videos", sorted(PROMPTS * 2))


@pytest.fixture
def serve(tmp_path):
    """Starts the program and returns its process and the link that it prints."""
    started = []

    def start(*words):
        command = [forked.python(), "-m", "scripts.rate", tmp_path / "study", "--port", "0", *words]
        process = subprocess.Popen(
            [*map(str, command), "--no_browser"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, process.stdout.readline().split()[1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def state_of(link):
    reply = httpx.get(link).raise_for_status()
    return json.loads(reply.text.partition('id="state">')[2].partition("</script>")[0])


def prefer(link, answer):
    """Answer the first pair that waits."""
    state = state_of(link)
    answers = {state["pairs"][0]["id"]: dict.fromkeys(state["questions"], answer)}
    content = {"token": state["token"], "answers": answers}
    httpx.post(f"{link}answers", json=content).raise_for_status()


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_each_answer_is_written_and_the_folder_alone_continues(videos, serve, tmp_path):
    process, link = serve("--videos", videos)
    state = state_of(link)
    assert sorted(pair["prompt"] for pair in state["pairs"]) == sorted(PROMPTS)
    assert list(state["questions"]) == ["Overall"]
    prefer(link, "first")
    (rating,) = read_ratings(tmp_path / "study/pairs.csv")
    assert rating.outcome == 0 and rating.request.prompt == state["pairs"][0]["prompt"]
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "not rated yet: 1" in output
    assert f"--objective dpo --pairs_csv {tmp_path}/study\n" in output

    process, link = serve()
    prefer(link, "tie")
    output = process.communicate(timeout=60)[0]  # the last answer ends the program
    assert process.returncode == 0 and "not rated yet: 0" in output
    assert [rating.outcome for rating in read_ratings(tmp_path / "study/pairs.csv")] == [0, 2]


def test_answers_of_two_raters_to_two_questions_are_written(
    videos, tmp_path, monkeypatch, exit_code
):
    monkeypatch.setattr(own_videos, "serve", lambda *_: True)
    words = ["--videos", videos, "--raters", "2", "--questions", "A=Which?", "B=Which one?"]
    assert exit_code(rate.main, tmp_path / "study", *words) == 0
    study = own_videos.rating.Study(tmp_path / "study")
    assert list(study.questions) == ["A", "B"]
    for token, rater in study.raters.items():
        answers = dict.fromkeys(rater["pairs"], {"A": "first", "B": "tie"})
        study.add(json.dumps({"token": token, "answers": answers}).encode())
    given = own_videos.write_pairs(study, own_videos.read_key(study))
    assert "8 answers" in own_videos.pairs_summary(study, given)
    assert "4 of them ties" in own_videos.pairs_summary(study, given)
    written = rows(tmp_path / "study/pairs.csv")
    answers = {(row["rater"], row["dimension"], row["answer"]) for row in written}
    assert answers == {(r, *a) for r in ("r01", "r02") for a in (("A", "first"), ("B", "tie"))}


def test_single_videos_are_kept_dropped_and_answered_again(videos, serve, tmp_path):
    process, link = serve("--keep", "true", "--videos", videos)
    assert [video["keep"] for video in state_of(link)] == [None] * 4
    assert httpx.get(f"{link}clips/3.mp4").content == (videos / "clip_3.mp4").read_bytes()
    for number, keep in ((0, True), (1, False), (0, False)):
        httpx.post(f"{link}answers", json={"number": number, "keep": keep}).raise_for_status()
    path = tmp_path / "study/videos.csv"
    assert [row["keep"] for row in rows(path)] == ["0", "0", "", ""]
    process.send_signal(signal.SIGINT)
    assert "not answered yet: 2" in process.communicate(timeout=60)[0]
    assert process.returncode == 130

    process, link = serve("--keep", "true", "--videos", videos)
    assert [video["keep"] for video in state_of(link)] == [False, False, None, None]
    for number in (2, 3):
        httpx.post(f"{link}answers", json={"number": number, "keep": True}).raise_for_status()
    httpx.post(f"{link}end", json={}).raise_for_status()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert f"--objective sft --videos_csv {tmp_path}/study --keep_fraction 1\n" in output
    kept = [example.videos[0].resolve() for example in read_examples([str(path)], 1.0)]
    assert kept == [videos / "clip_2.mp4", videos / "clip_3.mp4"]


def test_only_the_link_gives_access_and_wrong_answers_are_not_stored(videos, serve, tmp_path):
    _, link = serve("--keep", "--videos", videos)
    url = httpx.URL(link)
    for path in ("/", "/x/", "/x/clips/0.mp4", "/docs/", f"{url.path}clips/4.mp4"):
        assert httpx.get(url.copy_with(path=path)).status_code == 404, path
    assert httpx.post(url.copy_with(path="/x/end"), json={}).status_code == 404
    for wrong in ({"number": 4, "keep": True}, {"number": -1, "keep": True}, {"number": 0}, []):
        assert httpx.post(f"{link}answers", json=wrong).status_code == 422
    assert httpx.post(f"{link}answers", content=b" " * 20_000).status_code == 413
    assert [row["keep"] for row in rows(tmp_path / "study/videos.csv")] == [""] * 4


@pytest.mark.system
def test_a_person_answers_with_one_key_per_video(videos, serve, tmp_path):
    process, link = serve("--keep", "true", "--videos", videos)
    with start_chromium() as chromium:
        page = chromium.new_page()
        page.goto(link)
        for place, key in enumerate(["k", "d", "ArrowLeft", "k", "k", "d"]):
            shown = (1, 2, 3, 2, 3, 4)[place]
            page.locator("#count", has_text=f"Video {shown} of 4").wait_for()
            page.keyboard.press(key)
        page.locator("#result", has_text="You keep 3 of 4 videos.").wait_for()
        page.keyboard.press("Enter")
        page.locator("#closed").wait_for()
    assert process.wait(timeout=60) == 0
    assert [row["keep"] for row in rows(tmp_path / "study/videos.csv")] == ["1", "1", "1", "0"]


@pytest.mark.system
def test_two_videos_of_each_prompt_are_sampled_once(
    tmp_path, monkeypatch, exit_code, forked_programs
):
    monkeypatch.setattr(own_videos, "serve", lambda *_: True)
    (tmp_path / "prompts.csv").write_text("prompt\na red circle moves left\n")
    words = ["--config", "configs/miniature_dpo.yaml", "--prompts_csv", tmp_path / "prompts.csv"]
    words += ["--num_inference_steps", "1"]
    for _ in range(2):
        assert exit_code(rate.main, tmp_path / "study", *words) == 0
    assert len(list((tmp_path / "study/made").glob("*.mp4"))) == 2
    assert len(list((tmp_path / "study/videos").glob("*.safetensors"))) == 2
    monkeypatch.setattr(own_videos, "run", lambda _: 3)
    assert exit_code(rate.main, tmp_path / "other", *words) == 3


def test_wrong_flags_are_named_before_anything_is_sampled(videos, tmp_path, exit_code, capsys):
    single = write_folder(tmp_path / "single", PROMPTS)
    unnamed = write_folder(tmp_path / "unnamed", PROMPTS)
    for record in unnamed.glob("*.json"):
        record.unlink()
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("prompt\na red circle\n")
    wrong = [
        ([], "--prompts_csv"),
        (["--videos", tmp_path / "absent"], "--videos"),
        (["--videos", single], "--num_videos"),
        (["--videos", unnamed], "the rows of --prompts_csv"),
        (["--prompts_csv", prompts, "--num_videos", "1"], "--num_videos"),
        (["--prompts_csv", prompts, "--raters", "0"], "--raters"),
        (["--prompts_csv", prompts, "--rater", "2"], "--rater"),
        (["--videos", videos, "--seed", "2"], "--seed"),
        (["--videos", videos, "--questions", "A"], "--questions"),
        (["--videos", videos, "--keep", "true", "--raters", "2"], "--raters"),
    ]
    for number, (words, name) in enumerate(wrong):
        assert exit_code(rate.main, tmp_path / f"study{number}", *words) == 2
        assert name in capsys.readouterr().err
    assert not list(tmp_path.glob("study*"))
    assert exit_code(rate.main, prompts) == 2
    assert str(prompts) in capsys.readouterr().err


def test_a_folder_with_another_study_is_an_error(videos, tmp_path, exit_code, capsys, monkeypatch):
    monkeypatch.setattr(own_videos, "serve", lambda *_: True)
    study = tmp_path / "study"
    assert exit_code(rate.main, study, "--videos", videos) == 0
    assert exit_code(rate.main, study) == 0
    capsys.readouterr()
    assert exit_code(rate.main, study, "--videos", videos, "--raters", "2") == 2
    assert "raters" in capsys.readouterr().err


def test_with_a_config_existing_videos_are_shown_as_the_run_trains_on_them(tmp_path):
    videos = tmp_path / "videos"
    videos.mkdir()
    shades = torch.arange(20, dtype=torch.uint8)[:, None, None, None] * 12
    write_video(videos / "a.mp4", shades.expand(-1, 3, 48, 64), 16)
    write_video(videos / "b.mp4", shades[:9].expand(-1, 3, 32, 32), 8)
    for name in "ab":
        (videos / f"{name}.txt").write_text("a red circle moves up")
    plan = RatingPlan(keep=True, videos=str(videos), config="configs/miniature_sft.yaml")
    first, second = clips_to_rate(plan, tmp_path / "study")
    assert second.path == videos / "b.mp4" and first.path.parent == tmp_path / "study/as_trained"
    shown, fps = read_video(first.path)
    form = ClipForm(9, 32, 32, 8)
    assert fps == 8 and not form.changes(read_header(first.path))
    trained = read_clip(videos / "a.mp4", form)
    assert (read_clip(first.path, form).int() - trained.int()).abs().float().mean() < 2  # H.264
    assert shown.shape == (9, 3, 256, 256)
    assert [clip.path for clip in clips_to_rate(replace(plan, config=""), tmp_path)] == [
        videos / "a.mp4",
        videos / "b.mp4",
    ]
