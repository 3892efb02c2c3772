"""Tests of background scoring: failures become missing rewards with a reason."""

import math
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from hyvideo.rewards.rewards import ScoreResult, ScorerUnavailable
from hyvideo.rewards.scoring import AsyncScorer, score_safely

WEIGHTS = {"VQ": 0.5, "TA": 1.0}


class Brightness:
    """Scorer of the mean gray level that fails on videos for which ``accepts`` is false."""

    def __init__(self, accepts=lambda video: True, error=None):
        self.accepts, self.error, self.calls = accepts, error or RuntimeError("too dark"), []

    def score(self, videos, prompts, *, fps):
        self.calls.append(len(videos))
        if not all(map(self.accepts, videos)):
            raise self.error
        return [
            {"VQ": v.float().mean().item() / 255, "TA": float(len(p))}
            for v, p in zip(videos, prompts)
        ]

    def check_prompts(self, prompts):
        if "" in prompts:
            raise ValueError("no prompt may be empty")


class Returns(Brightness):
    """Returns a given result."""

    def __init__(self, result):
        self.result = result

    def score(self, videos, prompts, *, fps):
        return self.result


def videos(*levels):
    return [torch.full((4, 3, 16, 16), level, dtype=torch.uint8) for level in levels]


@pytest.fixture
def scorer_of():
    made = []

    def make(scorers, weights=WEIGHTS, **options):
        scorers = scorers if isinstance(scorers, dict) else {"test": scorers}
        made.append(AsyncScorer(scorers, weights, **options))
        return made[-1]

    yield make
    for async_scorer in made:
        async_scorer.close()


def test_a_video_on_which_a_scorer_without_a_weight_fails_has_a_missing_reward(scorer_of):
    """All videos of a group must be scored by the same scorers."""

    class Other(Brightness):
        dimensions = ("other",)

        def score(self, videos, prompts, *, fps):
            return [
                ScoreResult({"other": 1.0}, None if video.any() else "black") for video in videos
            ]

    failed, scored = scorer_of({"test": Brightness(), "other": Other()}).measure(
        videos(0, 255), ["ab", "c"], fps=8
    )
    assert math.isnan(failed.total) and failed.is_missing and failed.reason == "other: black"
    assert failed.scores == pytest.approx({"VQ": 0.0, "TA": 2.0, "other": 1.0})
    assert scored.total == pytest.approx(0.5 + 1) and not scored.is_missing


def test_the_reward_is_the_weighted_sum(scorer_of):
    first, second = scorer_of(Brightness()).measure(videos(51, 255), ["ab", "c"], fps=8)
    assert first.total == pytest.approx(0.5 * 0.2 + 2) and second.total == pytest.approx(0.5 + 1)
    assert (
        first.scores == pytest.approx({"VQ": 0.2, "TA": 2.0})
        and not first.is_missing
        and first.reason is None
    )


def test_a_broken_video_loses_only_its_own_reward(scorer_of):
    scorer = Brightness(accepts=lambda video: video.max() > 0)
    rewards = scorer_of(scorer, retries=1).measure(videos(10, 0, 20), ["a", "b", "c"], fps=8)
    assert [reward.is_missing for reward in rewards] == [False, True, False]
    assert "too dark" in rewards[1].reason and math.isnan(rewards[1].total)
    assert scorer.calls == [3, 3, 1, 1, 1]


def test_an_unavailable_scorer_is_not_called_for_every_video(scorer_of):
    scorer = Brightness(
        accepts=lambda video: False, error=ScorerUnavailable("no service at http://x")
    )
    rewards = scorer_of(scorer, retries=3).measure(videos(1, 2), ["a", "b"], fps=8)
    assert all(
        reward.is_missing and "no service at http://x" in reward.reason for reward in rewards
    )
    assert scorer.calls == [2]


def test_a_transient_failure_is_retried():
    scorer = Brightness(accepts=lambda video: len(scorer.calls) > 1)
    (result,) = score_safely(scorer, videos(255), ["a"], fps=8, retries=1)
    assert result.scores["VQ"] == 1 and result.reason is None


@pytest.mark.parametrize(
    "result, reason",
    [
        ([{"VQ": 1.0, "TA": math.nan}], "no finite score for TA"),
        ([{"VQ": 9e29, "TA": 9e29}], "no finite score for the weighted sum"),
        ([], "a list of 0"),
    ],
)
def test_invalid_results_are_missing_rewards(scorer_of, result, reason):
    (reward,) = scorer_of(Returns(result)).measure(videos(1), ["a"], fps=8)
    assert reward.is_missing and math.isnan(reward.total) and reason in reward.reason


def test_an_exception_of_a_scorer_is_a_missing_reward_with_a_short_reason(scorer_of):
    reason = "RuntimeError: xxx"
    error = RuntimeError("x" * 1_000_000)
    scorer = Brightness(accepts=lambda video: video.max() > 0, error=error)
    bad, good = scorer_of(scorer).measure(videos(0, 51), ["a", "b"], fps=8)
    assert bad.is_missing and reason in bad.reason and not good.is_missing
    assert len(bad.reason.encode()) < 5_000


def test_sys_exit_in_a_scorer_is_a_missing_reward(scorer_of):
    """Evaluation code that was a program calls sys.exit; with code 0, the run ended as a success."""
    scorer = Brightness(accepts=lambda video: video.max() > 0, error=SystemExit(0))
    bad, good = scorer_of(scorer).measure(videos(0, 51), ["a", "b"], fps=8)
    assert bad.is_missing and "sys.exit" in bad.reason and not good.is_missing


@pytest.mark.parametrize("number", [np.float32(0.5), torch.tensor([0.5])])
def test_numbers_of_numpy_and_torch_are_scores(scorer_of, number):
    (reward,) = scorer_of(Returns([{"VQ": number, "TA": np.int64(2)}])).measure(
        videos(1), ["a"], fps=8
    )
    assert reward.total == 2.25 and reward.scores == {"VQ": 0.5, "TA": 2.0}
    assert {type(score) for score in reward.scores.values()} == {float}


def test_a_dimension_without_weight_may_be_missing(scorer_of):
    (reward,) = scorer_of(Returns([{"VQ": 1.0, "MQ": math.nan, "TA": 2.0}])).measure(
        videos(1), ["a"], fps=8
    )
    assert reward.total == 2.5 and reward.reason is None


def test_scoring_runs_in_the_background(scorer_of):
    started, released = threading.Event(), threading.Event()

    class Slow(Brightness):
        def score(self, videos, prompts, *, fps):
            started.set()
            assert released.wait(10)
            return super().score(videos, prompts, fps=fps)

    async_scorer = scorer_of(Slow())
    pending = [
        async_scorer.submit((videos(1), ["a"]), fps=8),
        async_scorer.submit((videos(2), ["bb"]), fps=8),
    ]
    assert started.wait(10) and not pending[0].rewards.done()
    released.set()
    rewards = async_scorer.collect(pending)
    assert [reward.scores["TA"] for reward in rewards] == [1.0, 2.0]
    assert len(async_scorer.spans) == 2 and all(start < end for start, end in async_scorer.spans)


def test_rewards_after_the_deadline_are_missing_and_unstarted_batches_are_canceled(scorer_of):
    released = threading.Event()

    class Slow(Brightness):
        def score(self, videos, prompts, *, fps):
            assert prompts == ["a"] or released.wait(10)
            return super().score(videos, prompts, fps=fps)

    scorer = Slow()
    async_scorer = scorer_of(scorer, deadline=0.3)
    batches = [(videos(1), ["a"]), (videos(2), ["slow"]), (videos(3, 3), ["a", "b"])]
    start = time.monotonic()
    pending = [async_scorer.submit(batch, fps=8) for batch in batches]
    rewards = async_scorer.collect(pending)
    assert 0.3 <= time.monotonic() - start < 5
    assert [reward.is_missing for reward in rewards] == [False, True, True, True]
    assert all("deadline" in reward.reason for reward in rewards[1:])
    # while a scorer hangs, nothing is waited for
    assert async_scorer.measure(videos(4), ["a"], fps=8)[0].is_missing
    released.set()
    pending[1].rewards.result(10)
    assert not async_scorer.measure(videos(4), ["a"], fps=8)[0].is_missing
    assert scorer.calls == [1, 1, 1]


HANGS = """
import threading
import torch
from hyvideo.rewards.scoring import AsyncScorer

class Hangs:
    dimensions = ("VQ",)
    def score(self, videos, prompts, *, fps):
        threading.Event().wait()
    check_prompts = held_out = score

scorer = AsyncScorer({"test": Hangs()}, {"VQ": 1.0}, deadline=0.5)
clip = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
for _ in range(3):
    (reward,) = scorer.measure([clip], ["a"], fps=8)
    assert reward.is_missing and "deadline" in reward.reason, reward
scorer.close()
print("closed")
"""


@pytest.mark.system
def test_a_scorer_that_hangs_keeps_neither_the_run_nor_its_end_waiting():
    code = HANGS.replace(
        "import torch",
        "import torch\nfrom hyvideo.files import custom_code\ncustom_code.EXIT_SECONDS = 0.5",
    )
    start = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0 and ended.stdout == "closed\n", ended.stderr
    assert time.monotonic() - start < 50


def test_an_offloaded_scorer_moves_back_to_score(scorer_of):
    class Movable(Brightness):
        places = []

        def move_to(self, device):
            self.places.append(device)

        def score(self, videos, prompts, *, fps):
            assert self.places[-1] is None
            return super().score(videos, prompts, fps=fps)

    scorer = Movable()
    scorer_of(scorer, offload=True).measure(videos(1), ["a"], fps=8)
    assert scorer.places == ["cpu", None, "cpu"]
