"""Tests of the scorer check: valid scorers pass, and each fault fails the corresponding check."""

import dataclasses
import math
import random
import re
import time
from pathlib import Path

import pytest
import torch

from hyvideo.data.videos import check_video, read_video
from hyvideo.miniature.reward import MiniatureScorer, miniature_trial
from hyvideo.rewards import scorer_check
from hyvideo.rewards.scorer_check import check_scorer, has_failed, lines
from hyvideo.rewards.trial_clips import Trial, noisy, synthetic_trial
from hyvideo.rewards.videoalign import VideoAlignScorer

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "videoalign"
TRIAL = miniature_trial()


class Wrapped:
    """The miniature scorer with modified scores."""

    def __init__(self):
        self.inner = MiniatureScorer(ROOT / "assets" / "miniature")

    def score(self, videos, prompts, *, fps):
        return self.modify(self.inner.score(videos, prompts, fps=fps))

    def modify(self, scores):
        return scores

    def check_prompts(self, prompts):
        self.inner.check_prompts(prompts)

    def held_out(self, videos, prompts):
        return {}


class Random(Wrapped):
    def modify(self, scores):
        return [row | {"MQ": random.random()} for row in scores]


class NotANumber(Wrapped):
    def modify(self, scores):
        return [row | {"TA": math.nan} for row in scores]


class Incomplete(Wrapped):
    def modify(self, scores):
        return [{"VQ": row["VQ"], "MQ": row["MQ"]} for row in scores]


class DropsAScore(Wrapped):
    def modify(self, scores):
        return scores[:1] if len(scores) > 1 else scores


class Centered(Wrapped):
    """Returns scores relative to the batch mean."""

    def modify(self, scores):
        mean = sum(row["VQ"] for row in scores) / len(scores)
        return [row | {"VQ": row["VQ"] - mean} for row in scores]


class Swapped(Wrapped):
    def modify(self, scores):
        return scores[::-1]


class RoundsInBatches(Wrapped):
    """Rounds differently in a batch, as in low precision."""

    def modify(self, scores):
        return [row | {"VQ": row["VQ"] + 0.01 * (len(scores) > 1)} for row in scores]


class Inverted(Wrapped):
    def modify(self, scores):
        return [{name: -value for name, value in row.items()} for row in scores]


class Raises(Wrapped):
    def modify(self, scores):
        raise KeyError("weights")


class NotAList(Wrapped):
    def modify(self, scores):
        return scores[0]


class TooStrict(Wrapped):
    def check_prompts(self, prompts):
        raise ValueError("only haiku")


class RaisesAnotherError(Wrapped):
    def check_prompts(self, prompts):
        raise ConnectionError("no service")


class ModifiesTheVideo(Wrapped):
    def score(self, videos, prompts, *, fps):
        scores = super().score(videos, prompts, fps=fps)
        videos[0][0] = 0
        return scores


class Brightness(Wrapped):
    """Has a custom dimension and accepts every prompt."""

    dimensions = ("brightness",)

    def score(self, videos, prompts, *, fps):
        return [{"brightness": video.float().mean().item() / 255} for video in videos]

    def check_prompts(self, prompts):
        pass


class Words(Brightness):
    def score(self, videos, prompts, *, fps):
        return [{"brightness": "0.3"} for video in videos]


class Undeclared(Wrapped):
    def modify(self, scores):
        return [{"warm": row["VQ"], "balance": row["TA"]} for row in scores]


class Slow(Brightness):
    """Takes 0.02 seconds per video, and half a second more in the first call."""

    starts = True

    def score(self, videos, prompts, *, fps):
        time.sleep(0.02 * len(videos) + 0.5 * self.starts)
        self.starts = False
        return super().score(videos, prompts, fps=fps)


def states(scorer, trial=TRIAL, **options):
    return {check.name: check.state for check in check_scorer(scorer, trial, **options)}


@pytest.mark.parametrize("quick", [False, True])
def test_the_miniature_scorer_passes(quick):
    found = states(MiniatureScorer(ROOT / "assets" / "miniature"), quick=quick)
    assert set(found.values()) == {"ok"}
    assert {"answer", "dimensions", "repeat", "batch"} <= found.keys() and (
        "order" in found
    ) != quick


@pytest.mark.slow
def test_videoalign_passes_in_bf16():
    scorer = VideoAlignScorer(GOLDEN / "VideoReward", base=GOLDEN / "base")
    video, fps = read_video(GOLDEN / "videos" / "a_24fps_81f_96x160.mp4")
    checks = check_scorer(scorer, Trial(video, "a boat on a lake", fps))
    assert not has_failed(checks), lines(checks)


@pytest.fixture(scope="module")
def exact():
    return VideoAlignScorer(GOLDEN / "VideoReward", base=GOLDEN / "base", dtype=torch.float32)


@pytest.mark.system
def test_videoalign_passes_on_the_synthetic_video(exact):
    found = states(exact, synthetic_trial())
    assert {name for name, state in found.items() if state != "ok"} <= {
        "sign: noise",
        "sign: prompt",
    }


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    "scorer, rule",
    [
        (Random, "repeat"),
        (NotANumber, "dimensions"),
        (Incomplete, "dimensions"),
        (DropsAScore, "batch"),
        (Centered, "batch"),
        (Swapped, "batch"),
        (Raises, "answer"),
        (NotAList, "answer"),
        (TooStrict, "answer"),
        (RaisesAnotherError, "answer"),
    ],
)
def test_a_broken_scorer_fails_the_quick_and_the_full_check(scorer, rule, quick):
    checks = check_scorer(scorer(), TRIAL, quick=quick)
    assert has_failed(checks) and {check.name: check.state for check in checks}[rule] == "failed"


@pytest.mark.parametrize(
    "scorer, failed",
    [
        (Random, {"repeat", "batch", "order"}),
        (NotANumber, {"dimensions"}),
        (Incomplete, {"dimensions"}),
        (DropsAScore, {"batch", "order"}),
        (Centered, {"batch", "order"}),
        (Swapped, {"batch", "order"}),
    ],
)
def test_each_fault_fails_exactly_the_checks_about_it(scorer, failed):
    random.seed(0)
    found = states(scorer())
    assert {name for name, state in found.items() if state == "failed"} == failed


def test_a_custom_scorer_may_modify_the_video_because_it_receives_a_copy():
    trial = dataclasses.replace(TRIAL, video=TRIAL.video.clone())
    assert set(states(ModifiesTheVideo(), trial, quick=True).values()) == {"ok"}
    assert torch.equal(trial.video, TRIAL.video)


def test_a_shipped_scorer_that_modifies_the_video_fails(monkeypatch):
    score = MiniatureScorer.score

    def modifies(self, videos, prompts, *, fps):
        scores = score(self, videos, prompts, fps=fps)
        videos[0][0] = 0
        return scores

    monkeypatch.setattr(MiniatureScorer, "score", modifies)
    trial = dataclasses.replace(TRIAL, video=TRIAL.video.clone())
    (check,) = check_scorer(MiniatureScorer(ROOT / "assets" / "miniature"), trial, quick=True)
    assert check.state == "failed" and "modifies the input video" in check.detail


def test_the_detail_contains_the_answer():
    by_name = {check.name: check.detail for check in check_scorer(DropsAScore(), TRIAL)}
    assert "KeyError: 'weights'" in check_scorer(Raises(), TRIAL)[0].detail
    assert "one dict per video (2), got a list of 1 dict" in by_name["batch"]
    assert (
        "no finite number for TA"
        in dict((c.name, c.detail) for c in check_scorer(NotANumber(), TRIAL))["dimensions"]
    )


def test_an_error_of_the_scorer_names_the_line_in_its_file():
    for scorer, function, line in (
        (Raises(), "modify", 'raise KeyError("weights")'),
        (RaisesAnotherError(), "check_prompts", 'raise ConnectionError("no service")'),
    ):
        (check,) = check_scorer(scorer, TRIAL, quick=True)
        assert re.search(
            rf"; test_scorer_check.py:\d+ in {function}: {re.escape(line)}$", check.detail
        ), check.detail


def test_wrong_names_of_dimensions_are_answered_with_the_right_ones():
    def detail(scorer, **options):
        return {
            check.name: check.detail for check in check_scorer(scorer, TRIAL, quick=True, **options)
        }["dimensions"]

    assert detail(Brightness(), dimensions=["bright"]).endswith("; did you mean brightness?")
    assert detail(Brightness(), dimensions=["VQ"]).endswith(
        "check the class's `dimensions` and --reward_weights"
    )
    assert "got no numbers; check the class" in detail(Words())
    hint = "; the class needs a tuple `dimensions`: write dimensions = "
    assert detail(Undeclared()).endswith(hint + "('warm', 'balance')")
    missing_comma = Brightness()
    missing_comma.dimensions = "brightness"
    assert detail(missing_comma).endswith(hint + "('brightness',)")


def test_seconds_per_video_are_reported_without_the_first_call():
    detail = {check.name: check.detail for check in check_scorer(Slow(), TRIAL)}["speed"]
    assert re.match(
        r"0\.0[23]\d* s per video of 9 x 32 x 32; 32 take (0\.[6-9]|1)\S* s:", detail
    ), detail


def test_a_score_with_the_wrong_sign_is_a_warning():
    checks = check_scorer(Inverted(), TRIAL)
    assert {check.name for check in checks if check.state == "warning"} == {
        "sign: noise",
        "sign: prompt",
    }
    assert not has_failed(checks)


def test_small_differences_are_warnings_up_to_the_tolerance(monkeypatch):
    assert states(RoundsInBatches())["batch"] == "warning"
    monkeypatch.setattr(scorer_check, "TOLERANCE", 0.005)
    assert states(RoundsInBatches())["batch"] == "failed"


def test_a_scorer_may_have_custom_dimensions():
    found = states(Brightness())
    assert not {name for name, state in found.items() if state == "failed"}
    assert states(Brightness(), dimensions=["VQ"])["dimensions"] == "failed"


def test_the_trials_are_valid_videos():
    for trial in (TRIAL, synthetic_trial()):
        check_video(trial.video)
        assert trial.prompt != trial.foreign_prompt and trial.fps > 0
        other = noisy(trial.video)
        assert torch.equal(other, noisy(trial.video)) and other.dtype == torch.uint8
        assert 15 < (other.float() - trial.video.float()).std() < 45


def test_the_ball_moves_to_the_right_and_the_wall_to_the_left():
    video = synthetic_trial().video.float()
    redness = (video[:, 0] - video[:, 1]).clamp(min=50) - 50
    centers = (redness.sum(1) * torch.arange(video.shape[-1])).sum(-1) / redness.sum((1, 2))
    assert (centers.diff() > 0).all()
    top = video[:, 0, :20]
    assert torch.equal(top[-1], top[0].roll(-(video.shape[-1] // 8), dims=-1))
