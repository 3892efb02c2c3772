"""Held-out metrics: closed forms, and the changes of pixels that each of them detects."""

import itertools
import math
import os

import pytest
import torch
import torch.nn.functional as F

from hyvideo.data.randomness import generator, normal
from hyvideo.data.videos import to_uint8
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.miniature import world
from hyvideo.miniature.measures import features, frechet_distance, moments
from hyvideo.miniature.reward import MiniatureScorer
from hyvideo.rewards.rewards import Reward, SetMeasure
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.validation.reward_hacking.held_out_metrics import (
    ScorerMetrics,
    diversity,
    measure_video,
    measure_videos,
    summarise_videos,
    thumbnail,
)
from hyvideo.validation.reward_hacking.rule import Dispersion, ValidationStats, find_shifts
from tests.distributed.launch import launch


def grey(level, frames=5, size=16):
    return torch.full((frames, 3, size, size), level, dtype=torch.uint8)


def textured(key, frames=9, size=64):
    """Return slightly smoothed color noise."""
    noise = F.avg_pool2d(normal((frames, 3, size + 2, size + 2), "texture", key), 3, stride=1)
    return (128 + 120 * noise).clamp(1, 254).to(torch.uint8)


def moving_square(speed, frames=9, size=32):
    video = grey(64, frames, size)
    for i in range(frames):
        video[i, :, 8:16, i * speed : i * speed + 8] = 192
    return video


def test_a_constant_gray_video_is_frozen():
    found = measure_video(grey(51))
    assert found.exposure == pytest.approx(0.2)
    assert (found.motion, found.frozen, found.saturation, found.clipped, found.sharpness) == (
        0,
        1,
        0,
        0,
        0,
    )


def test_motion_of_a_square_is_its_changed_area():
    found = measure_video(moving_square(2))
    changed = 2 * 2 * 8 / 32**2  # two columns are covered, two uncovered
    assert found.motion == pytest.approx(changed * 128 / 255, rel=1e-5) and found.frozen == 0
    assert measure_video(moving_square(1)).motion == pytest.approx(found.motion / 2, rel=1e-5)


def test_a_video_that_stops_halfway_is_half_frozen():
    video = moving_square(2)
    video[5:] = video[4]
    assert measure_video(video).frozen == 0.5


def test_clipping_and_saturation_of_pure_colors():
    video = grey(100)
    video[:, 0, :8] = 255  # the upper half turns red
    found = measure_video(video)
    assert found.clipped == 0.5 and found.saturation == pytest.approx(0.5 * 155 / 255)


def test_blur_lowers_only_sharpness_and_a_grid_raises_it():
    video = textured("blur")
    blurred = F.avg_pool2d(video.float(), 3, stride=1, padding=1, count_include_pad=False).to(
        torch.uint8
    )
    grid = video.clone()
    grid[..., ::4, :] = 20
    before, after = measure_video(video), measure_video(blurred)
    assert after.sharpness < 0.5 * before.sharpness
    assert after.exposure == pytest.approx(before.exposure, abs=0.01)
    assert measure_video(grid).sharpness > 1.3 * before.sharpness


def test_sharpness_of_white_noise_is_1_at_any_contrast():
    for contrast in (10, 60):
        noise = (
            (128 + contrast * normal((4, 1, 64, 64), "white").clamp(-2, 2))
            .to(torch.uint8)
            .expand(4, 3, 64, 64)
        )
        assert measure_video(noise).sharpness == pytest.approx(1, rel=0.05)


def test_metrics_do_not_depend_on_size_and_length():
    """A subset of frames is measured, and motion at low resolution."""
    small = moving_square(2, frames=13)
    large = small.repeat_interleave(4, 2).repeat_interleave(4, 3)
    assert measure_video(large).motion == pytest.approx(measure_video(small).motion, rel=1e-5)
    long = torch.cat([textured("long", frames=40), textured("more", frames=41)])
    assert measure_video(long).exposure == pytest.approx(long.float().mean().item() / 255, abs=0.02)


def test_diversity_is_the_mean_distance_within_a_prompt():
    videos = [grey(0), grey(51), grey(102), grey(255)]
    pictures = torch.stack([thumbnail(video) for video in videos])
    assert diversity(pictures, ["a", "a", "a", "b"]).tolist() == pytest.approx(
        [(0.2 + 0.2 + 0.4) / 3]
    )
    assert diversity(pictures, ["a", "b", "a", "b"]).tolist() == pytest.approx([0.4, 0.8])
    assert diversity(pictures, list("abcd")).tolist() == []


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


def measure_sets(videos, prompts, scorer, mesh):
    metrics = ScorerMetrics(scorer, mesh)
    metrics.add(videos, prompts)
    return metrics.of_set(len(prompts))


def measure_all(videos, rewards, prompts, scorer, mesh, size=3):
    """Return mean and spread of each metric of single videos, measured in parts of ``size``."""
    metrics, found = ScorerMetrics(scorer, mesh), {}
    for start in range(0, len(prompts), size):
        part = {row: video for row, video in videos.items() if start <= row < start + size}
        found |= measure_videos(part, rewards, scorer.weights)
        metrics.add(part, prompts)
    return summarise_videos(found, metrics.of_videos(), prompts, mesh)


class Average:
    """Two metrics of the set: the mean brightness, and a count that needs three videos."""

    def held_out(self, videos, prompts):
        rows = torch.tensor([[video.float().mean() / 255] for video in videos])
        least = SetMeasure(rows, lambda rows: float(len(rows)) if len(rows) > 2 else math.nan)
        return {
            "frechet_distance": SetMeasure(rows, lambda rows: rows.mean().item()),
            "count": least,
        }


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
    return measure_sets(videos, ["a red circle moves up"] * count, scorer, mesh)


@pytest.mark.system
def test_set_metrics_do_not_depend_on_the_number_of_ranks():
    scorer = AsyncScorer({"test": MiniatureScorer("assets/miniature")}, {})
    clips = clean_clips(9)
    videos = dict(enumerate(clips))
    means, spreads = measure_sets(videos | {4: None}, ["a red circle moves up"] * 9, scorer, ALONE)
    assert spreads["frechet_distance"].count == 8
    for num_ranks in (2, 4):
        for found, found_spreads in launch(f"{__name__}:measured_on_ranks", num_ranks, 9, [4]):
            assert found == pytest.approx(means, rel=1e-6)  # of other batches
            assert found_spreads.keys() == spreads.keys()
            for name, spread in spreads.items():
                assert found_spreads[name] == pytest.approx(list(spread), rel=1e-6)
    whole = features(clips[[row for row in range(9) if row != 4]])
    assert means["frechet_distance"] == pytest.approx(
        frechet_distance(moments(whole), scorer.scorers["test"].reference), rel=1e-4
    )
    assert measure_sets({}, [], scorer, ALONE) == ({}, {})


def test_a_set_in_parts_has_the_metrics_of_the_whole_set():
    """A part may have no video that was decoded."""
    videos, prompts = dict(enumerate(clean_clips(9))) | {4: None}, ["a red circle moves up"] * 9
    scorer = AsyncScorer({"test": MiniatureScorer("assets/miniature")}, {})
    metrics = ScorerMetrics(scorer, ALONE)
    for start in range(0, 9, 4):
        metrics.add({row: videos[row] for row in range(start, min(start + 4, 9))}, prompts)
    assert metrics.of_set(9) == measure_sets(videos, prompts, scorer, ALONE)


def test_the_jackknife_error_of_a_mean_is_its_standard_error():
    videos = {row: grey(7 * row) for row in range(16)}
    means, spreads = measure_sets(videos, [""] * 16, AsyncScorer({"a": Average()}, {}), ALONE)
    levels = torch.arange(16) * 7 / 255
    assert means == {"frechet_distance": pytest.approx(levels.mean().item()), "count": 16}
    assert spreads == {
        "frechet_distance": (pytest.approx(levels.std(correction=0).item(), rel=1e-5), 16)
    }
    few = {0: videos[0], 1: videos[1]}
    means, spreads = measure_sets(few, [""] * 16, AsyncScorer({"a": Average()}, {}), ALONE)
    assert means.keys() == {"frechet_distance"} and spreads == {}


class Faulty(Average):
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
    "measures, reason",
    [
        (
            {"VQ": lambda rows: 7.0},
            "VQ",
        ),
        (
            {"bad": lambda rows: 1 / 0},
            "ZeroDivisionError",
        ),
    ],
)
def test_a_faulty_metric_of_the_set_is_missing(capsys, measures, reason):
    """Metrics of other scorers remain, and other metrics of the same one if only a
    function fails.
    """
    scorer, videos = Faulty(), {row: grey(7 * row) for row in range(4)}
    good = {"fine": lambda rows: float(len(rows))}
    scorer.held_out = lambda videos, prompts: {
        name: SetMeasure(torch.zeros(len(videos), 2), function)
        for name, function in (good | measures).items()
    }
    async_scorer = AsyncScorer({"mine": scorer, "average": Average()}, {})
    means, _ = measure_sets(videos, [""] * 4, async_scorer, ALONE)
    async_scorer.close()
    assert means["frechet_distance"] > 0 and not {"VQ", "reward", "bad"} & means.keys()
    assert ("fine" in means) is ("bad" in measures) and reason in capsys.readouterr().err


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


class FrechetOfRows(MiniatureScorer):
    """Takes rows of features instead of videos."""

    def held_out(self, videos, prompts):
        return {"frechet_distance": SetMeasure(torch.stack(videos), self._frechet_distance)}


def test_clean_sets_raise_no_alarm():
    """Distances of sets of 16 clean videos differ by up to a factor of 2.5, within their errors."""
    rows = torch.cat([features(clips) for clips in clean_clips(96).split(24)])
    picks, scorer, history = (
        generator(0, "sets"),
        AsyncScorer({"a": FrechetOfRows("assets/miniature")}, {}),
        [],
    )
    for place in range(16):
        chosen = rows[torch.from_numpy(picks.choice(96, 16, replace=False))]
        means, spreads = measure_sets(dict(enumerate(chosen)), [""] * 16, scorer, ALONE)
        history.append((means | {"reward": place}, spreads | {"reward": Dispersion(1e-3, 16)}))
    distances = [means["frechet_distance"] for means, _ in history]
    assert max(distances) > 2.5 * min(distances)
    for base, now in itertools.permutations(history, 2):
        risen = now[0] | {"reward": base[0]["reward"] + 1}
        assert not find_shifts([ValidationStats(0, *base), ValidationStats(1, risen, now[1])], 1.5)
