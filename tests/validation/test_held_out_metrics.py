"""Held-out metrics of a validation: of pixels, of scores without a weight, and of the scorers."""

import math
import os

import pytest
import torch

from hyvideo.data.randomness import generator
from hyvideo.data.videos import to_uint8
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.miniature import world
from hyvideo.miniature.measures import features, frechet_distance, moments
from hyvideo.miniature.reward import MiniatureScorer
from hyvideo.rewards.rewards import Reward
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.validation.held_out_metrics import ScorerMetrics, measure_videos, summarise_videos
from hyvideo.validation.pixels import measure_video
from tests.distributed.launch import launch
from tests.validation.test_pixels import grey, textured


def measured(videos, prompts, rewards=None):
    scored = rewards or [Reward(1.0, {})] * len(videos)
    found = measure_videos(dict(enumerate(videos)), dict(enumerate(scored)), {"VQ": 1.0})
    return summarise_videos(found, {}, prompts, Mesh.single())


def test_equal_videos_have_diversity_0_and_means_are_over_videos():
    same, spreads = measured([textured("x")] * 3, ["a"] * 3)
    assert same["held_out/diversity"] == 0 and spreads["held_out/exposure"] == (0, 3)
    two, spreads = measured([grey(51), grey(102), None], ["a", "b", "b"])
    assert two["held_out/exposure"] == pytest.approx(0.3) and two.keys() == {
        f"held_out/{name}" for name in vars(measure_video(grey(51)))
    }
    assert spreads["held_out/exposure"] == (pytest.approx(0.1), 2)


def test_scores_without_weight_are_measured():
    rewards = [
        Reward(1.0, {"VQ": 1.0, "MQ": value, "Overall": 9.0}) for value in (2.0, 4.0, math.nan)
    ]
    means, spreads = measured([grey(51)] * 3, ["a"] * 3, rewards)
    assert means["MQ"] == 3 and spreads["MQ"] == (1, 2) and not {"VQ", "Overall"} & means.keys()


# --- of the whole set -----------------------------------------------------------------------------

ALONE = Mesh.single()


def measure_set(videos, prompts, scorer, mesh):
    metrics = ScorerMetrics(scorer, mesh)
    metrics.add(videos, prompts)
    return metrics.of_set()


def measure_all(videos, rewards, prompts, scorer, mesh, size=3):
    """Return mean and spread of each metric of single videos, measured in parts of ``size``."""
    metrics, found = ScorerMetrics(scorer, mesh), {}
    for start in range(0, len(prompts), size):
        part = {row: video for row, video in videos.items() if start <= row < start + size}
        found |= measure_videos(part, rewards, scorer.weights)
        metrics.add(part, prompts)
    return summarise_videos(found, metrics.of_videos(), prompts, mesh)


def clean_clips(count):
    labels = world.LABELS.repeat(2, 1)[:count]
    return to_uint8(world.render(labels, generator(0, "clean"))).transpose(1, 2).contiguous()


def measured_on_ranks(count, missing):
    """Return set metrics of ``count`` videos, assigned to ranks in turn; the last is repeated to
    fill all ranks.
    """
    mesh = ranks.start(1, torch.device("cpu"))
    clips, scorer = (
        clean_clips(count),
        AsyncScorer({"test": MiniatureScorer("assets/miniature")}, {}),
    )
    rows = range(mesh.rank, count + -count % mesh.world_size, mesh.world_size)
    videos = {min(row, count - 1): clips[min(row, count - 1)] for row in rows}
    videos |= {row: None for row in missing if row in videos}
    return measure_set(videos, ["a red circle moves up"] * count, scorer, mesh)


@pytest.mark.system
def test_metrics_of_the_set_do_not_depend_on_the_number_of_ranks():
    scorer = AsyncScorer({"test": MiniatureScorer("assets/miniature")}, {})
    clips = clean_clips(9)
    videos = dict(enumerate(clips)) | {4: None}
    found = measure_set(videos, ["a red circle moves up"] * 9, scorer, ALONE)
    for num_ranks in (2, 4):
        for of_rank in launch(f"{__name__}:measured_on_ranks", num_ranks, 9, [4]):
            assert of_rank == found
    whole = features(clips[[row for row in range(9) if row != 4]])
    assert found["frechet_distance"] == pytest.approx(
        frechet_distance(moments(whole), scorer.scorers["test"].reference), rel=1e-4
    )
    assert measure_set({}, [], scorer, ALONE) == {}


class Counts:
    """Records the calls of its method for the whole set."""

    def __init__(self):
        self.calls = []

    def features(self, videos, prompts):
        rows = [
            [video.float().mean() / 255, float(len(text))] for video, text in zip(videos, prompts)
        ]
        return torch.tensor(rows)

    def held_out(self, features):
        self.calls.append(features)
        return {"brightness": features[:, 0].mean(), "undefined": math.nan}


def test_a_set_in_parts_is_measured_once():
    """A part may have no video that was decoded."""
    scorer = Counts()
    async_scorer = AsyncScorer({"test": scorer}, {})
    videos = {row: grey(10 * row) for row in range(9)} | {4: None}
    prompts = ["x" * row for row in range(9)]
    metrics = ScorerMetrics(async_scorer, ALONE)
    for rows in ([5, 6, 7, 8], [4], [0, 1, 2, 3]):
        metrics.add({row: videos[row] for row in rows}, prompts)
    found = metrics.of_set()
    async_scorer.close()
    assert found == {
        "brightness": pytest.approx(sum(10 * row for row in range(9) if row != 4) / 8 / 255)
    }
    (features,) = scorer.calls
    assert features.dtype == torch.float64
    assert features[:, 1].tolist() == [row for row in range(9) if row != 4]


class Faulty:
    """A scorer whose held-out methods can be replaced."""

    def score(self, videos, prompts, *, fps):
        return [{"VQ": 1.0} for _ in videos]

    def held_out_each(self, videos, prompts):
        return [{"level": video.float().mean().item()} for video in videos]


def drops_a_row(videos, prompts):
    return [{"level": 1.0}]


def fails(videos, prompts):
    raise RuntimeError("late")


def blackens(videos, prompts):
    for video in videos:
        video.zero_()
    return [{"level": 1.0} for _ in videos]


@pytest.mark.parametrize(
    "method, reason",
    [
        (
            drops_a_row,
            "held_out_each",
        ),
        (blackens, ""),
    ],
)
def test_a_faulty_held_out_method_loses_only_its_metrics(capsys, method, reason):
    """The built-in metrics are those of all videos, which the method did not change."""
    videos = {row: textured(row) for row in range(8)}
    local = {row: Reward(1.0, {"VQ": 1.0}) for row in videos}
    scorer, found = Faulty(), {}
    for name in ("good", "faulty"):
        if name == "faulty":
            scorer.held_out_each = method
        async_scorer = AsyncScorer({"mine": scorer}, {"VQ": 1.0})
        found[name] = measure_all(videos, local, ["a"] * 8, async_scorer, ALONE)
        async_scorer.close()
    assert not reason or reason in capsys.readouterr().err
    means, spreads = found["faulty"]
    assert (
        ("level" in means) is (not reason)
        and "VQ" not in means
        and spreads["held_out/exposure"].count == 8
    )
    for good, faulty in zip(found["good"], found["faulty"]):
        assert {n: v for n, v in faulty.items() if n != "level"} == {
            n: v for n, v in good.items() if n != "level"
        }


@pytest.mark.parametrize(
    "answer, reason",
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: {"bad": torch.zeros(2)}, "bad must be one number"),
        (lambda: {"reward": 1.0}, "reward"),
        (lambda: 7.0, "held_out must return"),
    ],
)
def test_a_faulty_method_of_the_set_loses_only_the_metrics_of_its_scorer(capsys, answer, reason):
    scorer, videos = Faulty(), {row: grey(7 * row) for row in range(4)}
    scorer.features = lambda videos, prompts: torch.ones(len(videos), 1)
    scorer.held_out = lambda features: answer()
    async_scorer = AsyncScorer({"mine": scorer, "other": Counts()}, {})
    found = measure_set(videos, [""] * 4, async_scorer, ALONE)
    async_scorer.close()
    assert found.keys() == {"brightness"} and reason in capsys.readouterr().err


def test_a_metric_with_a_taken_name_is_named_after_its_scorer():
    first, second = Faulty(), Faulty()
    first.held_out_each = lambda videos, prompts: [
        {"VQ": 3.0, "same": 1.0, "level": level} for level in (5.0, 6.0)
    ]
    # the levels are equal by chance in one video
    second.held_out_each = lambda videos, prompts: [
        {"same": 1.0, "level": level} for level in (5.0, 7.0)
    ]
    async_scorer = AsyncScorer({"a.py:A": first, "b.py:B": second}, {"a.py:A": {"VQ": 1.0}})
    metrics = ScorerMetrics(async_scorer, ALONE)
    metrics.add({0: grey(1), 1: grey(2)}, ["a", "b"])
    async_scorer.close()
    assert metrics.of_videos() == {
        0: {"A/VQ": 3.0, "same": 1.0, "level": 5.0, "B/level": 5.0},
        1: {"A/VQ": 3.0, "same": 1.0, "level": 6.0, "B/level": 7.0},
    }


class FailsOnRank1(Faulty):
    def held_out_each(self, videos, prompts):
        if int(os.environ["RANK"]) == 1:
            raise RuntimeError("one bad video")
        return super().held_out_each(videos, prompts)


def measured_with_a_failing_rank():
    mesh = ranks.start(1, torch.device("cpu"))
    videos, scorer = (
        {mesh.rank: grey(51 * (1 + mesh.rank))},
        AsyncScorer({"mine": FailsOnRank1()}, {"VQ": 1.0}),
    )
    local = {mesh.rank: Reward(1.0, {"VQ": 1.0})}
    means, spreads = measure_all(videos, local, ["a"] * 2, scorer, mesh)
    return sorted(means), spreads["held_out/exposure"].count


def test_a_metric_that_fails_on_one_rank_is_missing_on_all():
    first, second = launch(f"{__name__}:measured_with_a_failing_rank", 2)
    assert first == second and first[1] == 2 and "level" not in first[0]
