"""Tests of training a reward on pairs.

Simulated raters prefer larger shapes, which the shipped reward ignores.
"""

import csv
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from examples.size_preference import rated_pairs
from hyvideo.data.pairs import OUTCOMES
from hyvideo.data.videos import write_video
from hyvideo.miniature import world
from hyvideo.ratings.reward_training import (
    PATIENCE,
    TIE,
    PairTraining,
    RatedPair,
    read_pairs,
    split_by_prompt,
)
from hyvideo.rewards.videoalign import VideoAlignScorer
from scripts.train_reward import main

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "assets" / "miniature" / "VideoReward"


def rated(count, seed, smallest=0.75):
    """Return videos by path, and pairs of them whose rater prefers the larger shape."""
    videos, pairs = {}, []
    for number, (prompt, clips, answer) in enumerate(rated_pairs(count, seed, smallest)):
        paths = Path(f"{number}a.mp4"), Path(f"{number}b.mp4")
        videos |= zip(paths, clips)
        pairs.append(RatedPair(prompt, paths, [("SIZE", OUTCOMES[answer])]))
    return videos, pairs


def write_csv(folder, rows, columns="prompt,first,second,dimension,answer"):
    with open(folder / "pairs.csv", "w", newline="") as file:
        csv.writer(file).writerows([columns.split(","), *rows])
    return folder / "pairs.csv"


def test_probabilities_follow_bradley_terry_with_ties():
    training = PairTraining.__new__(PairTraining)
    training.names = ["A", "B", "C"]
    training.scores = lambda pairs: torch.tensor([[[9.0, 1.5, 9.0], [7.0, 0.5, 7.0]]])
    pair = RatedPair("a", (Path("1"), Path("2")), [("A", 0), ("B", 1), ("B", TIE)])
    log_probs, places = training.answers([pair], ["B"])
    s1, s2, theta = math.exp(1.5), math.exp(0.5), 5.0
    first, second = s1 / (s1 + theta * s2), s2 / (s2 + theta * s1)
    assert places.tolist() == [1, 2] and torch.equal(log_probs[0], log_probs[1])
    assert log_probs[0].exp().tolist() == pytest.approx([first, second, 1 - first - second])


class OneParameter(PairTraining):
    """Training of a single parameter, the score of every first video; the second scores 0."""

    def __init__(self, train, stop, test=(), batch_size=1):
        prompts = (Path("1"), Path("2"))
        sides = {"train": train, "stop": stop, "test": test}
        self.split = {
            part: [RatedPair("a", prompts, [("A", side)]) for side in answers]
            for part, answers in sides.items()
        }
        self.names, self.batch_size, self.score = (
            ["A"],
            batch_size,
            torch.tensor(0.0, requires_grad=True),
        )

    def _trainable(self, lora_rank, seed):
        return [self.score]

    def scores(self, pairs):
        return torch.stack([self.score, 0 * self.score]).view(1, 2, 1).expand(len(pairs), 2, 1)


FIT = {"learning_rate": 0.01, "weight_decay": 0.0, "lora_rank": 1, "seed": 0}


def test_training_stops_early_and_keeps_the_best_weights():
    training = OneParameter(train=[0, 0], stop=[1])
    losses = training.fit(max_epochs=10, **FIT)
    assert len(losses) == 1 + PATIENCE and losses == sorted(losses)
    assert training.score == 0


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_training_before_the_weights_change(gradient):
    training = OneParameter(train=[0, 0, 0], stop=[0], batch_size=2)
    training.score.register_hook(lambda found: found + gradient)
    with pytest.raises(FloatingPointError, match="--learning_rate"):
        training.fit(max_epochs=1, **FIT)
    assert training.score == 0


def test_quality_is_accuracy_on_preferences_and_loss_on_all_answers(tmp_path):
    training = OneParameter([], [], test=[0, 0, 1, TIE])
    training.score = torch.tensor(1.0)
    first, second = math.e / (math.e + 5), 1 / (1 + 5 * math.e)
    loss = -(2 * math.log(first) + math.log(second) + math.log(1 - first - second)) / 4
    quality = {"accuracy": pytest.approx(2 / 3), "preferences": 3, "loss": pytest.approx(loss)}
    assert training.quality(tmp_path / "calibration.png") == {"A": quality}


def test_pairs_are_read_with_all_answers(tmp_path):
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        (tmp_path / name).touch()
    rows = [
        ["x, y", "a.mp4", "b.mp4", "VQ", "first", "1"],
        ["x, y", "a.mp4", "b.mp4", "TA", "both_bad", "1"],
        ["x, y", "a.mp4", "b.mp4", "VQ", "second", "2"],
        ["x, y", "a.mp4", "b.mp4", "overall", "second", "2"],
        ["x, y", "a.mp4", "a.mp4", "VQ", "tie", "2"],
        ["z", "a.mp4", "c.mp4", "MQ", "tie", "2"],
    ]
    a, b, c = (tmp_path / name for name in ("a.mp4", "b.mp4", "c.mp4"))
    assert read_pairs(
        write_csv(tmp_path, rows, "prompt,first,second,dimension,answer,rater"), ("VQ", "MQ", "TA")
    ) == [
        RatedPair("x, y", (a, b), [("VQ", 0), ("TA", TIE), ("VQ", 1)]),
        RatedPair("z", (a, c), [("MQ", TIE)]),
    ]


@pytest.mark.parametrize("columns", ["prompt,first,second,answer", "prompt,path1,path2,answer"])
def test_answers_about_the_whole_video_belong_to_the_new_name(tmp_path, columns):
    """HPDv3, GenAI-Bench and VideoDPO have one answer for a pair."""
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).touch()
    pairs = write_csv(tmp_path, [["x", "a.mp4", "b.mp4", "first"]], columns)
    (found,) = read_pairs(pairs, ("VQ", "MQ", "BETTER"))
    assert found.answers == [("BETTER", 0)]
    for names in (("VQ", "MQ", "TA"), ("A", "B")):
        with pytest.raises(ValueError, match="--dimensions VQ MQ BETTER"):
            read_pairs(pairs, names)


def test_split_parts_share_no_prompt_and_depend_on_the_seed():
    pairs = [RatedPair(str(k % 20), (Path(f"{k}"), Path("b")), [("VQ", k % 2)]) for k in range(60)]
    split = split_by_prompt(pairs, [], 0)
    prompts = {part: {pair.prompt for pair in members} for part, members in split.items()}
    assert {part: len(members) for part, members in prompts.items()} == {
        "test": 3,
        "stop": 3,
        "train": 14,
    }
    assert len(set.union(*prompts.values())) == 20 and sum(map(len, split.values())) == 60
    assert split == split_by_prompt(pairs, [], 0) != split_by_prompt(pairs, [], 1)


GOOD = [[prompt, "a.mp4", "b.mp4", "VQ", "first"] for prompt in "abcd"]


@pytest.mark.parametrize(
    "rows, options, message",
    [
        (
            [*GOOD, ["e", "a.mp4", "gone.mp4", "VQ", "first"]],
            [],
            "second .*gone.mp4.* row 5 of .*pairs.csv",
        ),
        (
            [["a", "a.mp4", "b.mp4", "VQ", "better"]],
            [],
            "'better' in row 1 of .*pairs.csv",
        ),
        (GOOD, ["--reward_path", "nowhere"], "file not found: .*nowhere/model_config.json"),
    ],
)
def test_invalid_input_is_one_error_before_a_model_is_loaded(
    tmp_path, monkeypatch, capsys, rows, options, message
):
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).touch()
    given = [
        "--pairs",
        write_csv(tmp_path, rows),
        "--reward_path",
        SHIPPED,
        "--output_dir",
        tmp_path / "out",
        *options,
    ]
    monkeypatch.setattr(sys, "argv", ["train_reward", *map(str, given)])
    monkeypatch.setattr(
        VideoAlignScorer, "__init__", lambda *_, **__: pytest.fail("a model was loaded")
    )
    with pytest.raises(SystemExit) as stopped:
        main()
    output = capsys.readouterr().err
    assert stopped.value.code == 2 and len(output.splitlines()) == 1
    assert re.search(message, output), output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_program_is_repeatable_for_the_same_seed(tmp_path, monkeypatch, capsys):
    videos, pairs = rated(6, 0)
    for path, clip in videos.items():
        write_video(tmp_path / path, clip, world.FPS)
    prompts = [world.CAPTIONS[k % 3] for k in range(6)]
    rows = [
        [prompt, *pair.videos, "SIZE", ("first", "second")[k % 2]]
        for k, (prompt, pair) in enumerate(zip(prompts, pairs))
    ]
    options = [
        "--pairs",
        write_csv(tmp_path, rows),
        "--reward_path",
        SHIPPED,
        "--dimensions",
        "SIZE",
        "--max_epochs",
        1,
    ]
    for out in ("first", "second"):
        arguments = [
            "train_reward",
            *options,
            "--learning_rate",
            1e-3,
            "--lora_rank",
            2,
            "--output_dir",
            tmp_path / out,
        ]
        monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
        assert main() == 0
    first, second = (
        torch.load(tmp_path / out / "checkpoint-1" / "model.pth") for out in ("first", "second")
    )
    shipped = torch.load(SHIPPED / "checkpoint-1" / "model.pth")
    assert first.keys() == second.keys() == shipped.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    changed = {name.split(".")[-2] for name in first if not torch.equal(first[name], shipped[name])}
    targets = {f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down")}
    assert "rm_head" in changed and len(changed) > 1 and changed <= targets | {"rm_head"}
    *_, heading, row = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["dimension", "preferences"] and len(heading) == len(row)
    assert re.fullmatch(r"SIZE +2 \(too few: below 30\)( +\d\.\d{3}){4}", row)
    report = json.loads((tmp_path / "first" / "training.json").read_text())
    assert report["pairs"] == {"test": 2, "stop": 2, "train": 2} and len(report["losses"]) == 2
    assert (
        report["after"]["SIZE"]["preferences"] == 2
        and (tmp_path / "first" / "calibration.png").is_file()
    )
    assert json.loads((tmp_path / "first" / "model_config.json").read_text())["data_config"][
        "eval_dim"
    ] == ["SIZE"]


@pytest.mark.slow
def test_the_lora_of_a_released_checkpoint_is_trained_and_merged(tmp_path):
    golden = ROOT / "tests" / "golden" / "videoalign"
    clips = {
        Path("a"): torch.zeros(4, 3, 64, 64, dtype=torch.uint8),
        Path("b"): torch.full((4, 3, 64, 64), 99).byte(),
    }
    pairs = [RatedPair(prompt, tuple(clips), [("VQ", 0), ("TA", 1)]) for prompt in "abc"]
    training = PairTraining(
        golden / "VideoReward", split_by_prompt(pairs, [], 0), ["VQ", "MQ", "TA"], 1
    )
    assert training.scorer.settings.lora
    training.frames = lambda path: training.scorer.sample_frames(clips[path], 8.0)
    losses = training.fit(learning_rate=1e-4, weight_decay=0.0, lora_rank=64, seed=0, max_epochs=1)
    assert losses[1] < losses[0]
    with torch.no_grad():
        trained, raw = (
            training.scores(pairs[:1]),
            training.scores(training.split["train"]).flatten(0, 1),
        )
        training.write(tmp_path)
        constants = [(f"{name}_mean", f"{name}_std") for name in ("VQ", "MQ", "TA")]
        written = torch.tensor(
            [[training.scorer.settings.normalisation[name] for name in pair] for pair in constants]
        )
        assert (
            torch.allclose(written, torch.stack([raw.mean(0), raw.std(0)], dim=1))
            and raw.std(0).max() > 1.1
        )
        assert training.scorer.settings.lora is None
        # weights are rounded to bf16
        assert (training.scores(pairs[:1]) - trained).abs().max() < 0.1
    assert training.quality(tmp_path / "after.png").keys() == {"VQ", "TA"}
