"""The contract of a scorer: what it is given, what it may return, and what it must leave alone."""

import os
import warnings

import pytest
import torch

from hyvideo.files.custom_code import restored_state
from hyvideo.rewards import contract
from hyvideo.rewards.rewards import Scorer, make_scorer
from hyvideo.rewards.scoring import AsyncScorer

PROMPTS = ["a", "b"]


def videos():
    return [torch.full((4, 3, 16, 16), level, dtype=torch.uint8) for level in (51, 204)]


class Brightness(Scorer):
    """Scorer of the mean gray level with metrics of each kind."""

    dimensions = ("VQ",)

    def score(self, videos, prompts, *, fps):
        return [{"VQ": video.float().mean().item() / 255} for video in videos]

    def held_out_each(self, videos, prompts):
        return [{"level": video.float().mean().item()} for video in videos]

    def features(self, videos, prompts):
        return torch.stack([video.float().mean()[None] for video in videos])


METHODS = {
    "score": lambda scorer, clips, prompts: contract.score(scorer, clips, prompts, fps=8.0),
    "held_out_each": contract.held_out_each,
    "features": contract.features,
}


# --- what a scorer is given -----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_custom_scorer_may_change_its_videos_and_lists(method):
    class Destroys(Brightness):
        pass

    def destroys(self, videos, prompts, **options):
        found = getattr(Brightness, method)(self, videos, prompts, **options)
        videos[0].zero_()
        videos[1].numpy()[:] = 7
        videos[1].resize_(0)
        videos.clear()
        prompts.clear()
        return found

    setattr(Destroys, method, destroys)
    clips, prompts = videos(), [*PROMPTS]
    found = METHODS[method](Destroys(), clips, prompts)
    expected = METHODS[method](Brightness(), videos(), PROMPTS)
    assert repr(found) == repr(expected)
    assert prompts == PROMPTS and all(map(torch.equal, clips, videos()))


# --- what a scorer returns ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, message",
    [
        (
            [{"m": 1.0}],
            r"held_out_each must return a list with one dict per video \(2\), got a list of 1 dict",
        ),
        ([{"held_out/frozen": 1.0}, {}], "must not begin with held_out/, got 'held_out/frozen'"),
    ],
)
def test_unusable_metrics_of_videos_are_rejected(rows, message):
    scorer = Brightness()
    scorer.held_out_each = lambda videos, prompts: rows
    with pytest.raises(ValueError, match=message):
        contract.held_out_each(scorer, videos(), PROMPTS)


# --- what a scorer leaves alone -------------------------------------------------------------------


CHANGES = {
    "gradient": lambda: torch.set_grad_enabled(False),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "folder": lambda: os.chdir("/"),
}


def state():
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        os.getcwd(),
    )


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_process_are_undone(name):
    before = state()
    with restored_state():
        CHANGES[name]()
        assert state() != before
    assert state() == before


FILE = """
import torch, sys
from hyvideo.rewards.rewards import Scorer
torch.set_grad_enabled(False)
class Mine(Scorer):
    def __init__(self, raises: str = ""):
        torch.set_default_dtype(torch.float64)
        if raises == "OSError":
            open("/nonexistent/weights.bin")
        if raises:
            sys.exit(0) if raises == "exit" else exec("raise RuntimeError('no weights')")
"""


def test_the_file_and_the_constructor_of_a_scorer_change_nothing(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    before = state()
    make_scorer(f"{tmp_path}/mine.py:Mine", "ckpts")
    assert state() == before


def test_a_background_thread_also_restores_the_folder_and_the_dtype():
    class Changes(Brightness):
        def score(self, videos, prompts, *, fps):
            os.chdir("/")
            torch.set_default_dtype(torch.float64)
            return super().score(videos, prompts, fps=fps)

    before, scorer = state(), AsyncScorer({"mine": Changes()}, {"VQ": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rewards = scorer.measure(videos(), PROMPTS, fps=8.0)
    scorer.close()
    assert state() == before and not any(reward.is_missing for reward in rewards)
