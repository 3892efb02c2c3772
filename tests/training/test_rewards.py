"""Creating the scorers of the settings, checking them before a run, and missing rewards."""

import json
import math
import re
import shlex
import statistics
import threading
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from hyvideo.checks.rules import check
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.collectives import barrier
from hyvideo.records.metrics_file import read_metrics
from hyvideo.rewards.rewards import FunctionScorer, Reward
from hyvideo.settings.command_line import load_config, parse
from hyvideo.settings.reward_settings import reward_weights
from hyvideo.trainer import Trainer
from hyvideo.training.rewards import (
    GroupRewards,
    TooManyMissingRewards,
    gather_rewards,
    make_async_scorer,
    try_scorers,
)
from hyvideo.training.rollout_batch import RolloutIndex
from hyvideo.training.rollouts import PendingRewards
from hyvideo.validation.held_out import all_shifts, read_validation
from tests.distributed.launch import launch
from tests.shallow import SHALLOW

CPU = torch.device("cpu")
PROMPT = "a red circle moves up"


class Fixed:
    """Returns constant scores."""

    def __init__(self, **scores):
        self.scores = scores

    def score(self, videos, prompts, *, fps):
        return [dict(self.scores) for _ in videos]

    def check_prompts(self, prompts):
        pass

    def held_out(self, videos, prompts):
        return {}


@pytest.fixture
def make_scorer(tiny_config):
    created = []

    def make(scorers=None, **settings):
        config = tiny_config.with_settings(**settings)
        created.append(make_async_scorer(config, CPU, scorers))
        return config, created[-1]

    yield make
    for scorer in created:
        scorer.close()


def test_scorers_and_their_options_come_from_the_settings(make_scorer, tmp_path):
    _, scorer = make_scorer()
    assert list(scorer.scorers) == ["miniature"] and scorer.weights == {
        "VQ": 0.5,
        "MQ": 0.5,
        "TA": 1.0,
    }
    options = tmp_path / "rewards.yaml"
    options.write_text(f"miniature: {{path: {tmp_path}}}\n")
    _, scorer = make_scorer(reward_config=str(options))
    assert scorer.scorers["miniature"].reference is None
    options.write_text("miniature: {path: nowhere}\n")
    with pytest.raises(ValueError, match="the miniature's folder must exist, got 'nowhere'"):
        make_scorer(reward_config=str(options))


def test_each_scorer_has_its_own_options(make_scorer, tmp_path):
    file = tmp_path / "scales.py"
    names = [f"{file}:{name}" for name in ("one", "two", "three")]
    file.write_text(
        "".join(
            f"def {name}(videos, prompts, fps, scale=1.0):\n    return [scale] * len(videos)\n"
            for name in ("one", "two", "three")
        )
    )
    options = {names[1]: {"scale": 5.0}, names[2]: {"scale": 7.0}}
    _, scorer = make_scorer(
        reward_model=names,
        reward_config=json.dumps(options),
        reward_weights='{"one": 100, "two": 10, "three": 1}',
    )
    video = torch.zeros(5, 3, 16, 16, dtype=torch.uint8)
    (reward,) = scorer.measure([video], [PROMPT], fps=8)
    assert reward.scores == {"one": 1.0, "two": 5.0, "three": 7.0} and reward.total == 157


@pytest.mark.parametrize(
    "text, message",
    [
        ("miniature: 3", "must map miniature to a mapping of options, got 'miniature'"),
    ],
)
def test_invalid_options_are_rejected(make_scorer, tmp_path, text, message):
    options = tmp_path / "rewards.yaml"
    options.write_text(text)
    with pytest.raises(ValueError, match=message):
        make_scorer(reward_config=str(options))


def test_two_scorers_with_one_undeclared_dimension_and_weights_without_a_score_are_rejected(
    make_scorer,
):
    scorers = {name: Fixed(**{name: 1.0, "extra": 2.0}) for name in ("a", "b")}
    for name, scorer in scorers.items():
        scorer.dimensions = (name,)
    config, scorer = make_scorer(scorers, reward_weights='{"a": 1}')
    with pytest.raises(
        ValueError,
        match="rewards a and b both return extra; declare it in `dimensions`, or rename it",
    ):
        try_scorers(scorer, config.data, PROMPT)
    del scorers["b"].scores["extra"]
    try_scorers(scorer, config.data, PROMPT)
    config, scorer = make_scorer(scorers, reward_weights='{"a": 1, "c": 2}')
    with pytest.raises(
        ValueError, match="reward_weights must name scores of the scorers, a, extra, b, got c"
    ):
        try_scorers(scorer, config.data, PROMPT)


def test_weights_by_scorer_reach_the_scores_that_they_name(make_scorer):
    scorers = {name: Fixed(VQ=value, MQ=1.0, TA=1.0) for name, value in (("a", 1.0), ("b", 10.0))}
    config, scorer = make_scorer(scorers, reward_weights='{"a": {"VQ": 1}, "b": {"VQ": 0.5}}')
    try_scorers(scorer, config.data, PROMPT)
    (reward,) = scorer.measure([torch.zeros(5, 3, 16, 16, dtype=torch.uint8)], [PROMPT], fps=8)
    assert reward.total == 6.0 and reward_weights(config.reward) == {"a/VQ": 1, "b/VQ": 0.5}


def test_an_offloaded_scorer_is_checked_on_its_device(make_scorer):
    class Movable(Fixed):
        places = []

        def move_to(self, device):
            self.places.append(device)

        def score(self, videos, prompts, *, fps):
            assert self.places[-1] is None
            return super().score(videos, prompts, fps=fps)

    mine = Movable(VQ=1.0, MQ=1.0, TA=1.0)
    config, scorer = make_scorer({"mine": mine}, offload=["reward"])
    try_scorers(scorer, config.data, PROMPT)
    assert mine.places == ["cpu", None, "cpu"]


def test_a_scorer_without_a_weighted_dimension_is_rejected(make_scorer):
    bad = Fixed(VQ=1.0, MQ=math.nan, TA=1.0)
    config, scorer = make_scorer({"bad": bad})
    with pytest.raises(ValueError, match="reward bad must return a finite number for MQ"):
        try_scorers(scorer, config.data, PROMPT)
    bad.scores["MQ"] = 1.0
    try_scorers(scorer, config.data, PROMPT)


def test_exactly_the_allowed_fraction_may_be_missing_in_every_iteration(tiny_config, mesh, capsys):
    local = {0: Reward(math.nan, {}, "test: broken")}
    config = tiny_config.with_settings(max_missing_fraction=0.5)
    rewards = GroupRewards(
        config.reward, make_async_scorer(config, CPU, {}), mesh, group_size=4, num_rollouts=4
    )
    for missing in (2.0, 0.0, 2.0):
        rewards.check_failed_rewards({"reward/missing": missing}, local, 7)
    assert (
        capsys.readouterr().err.count(
            "2 of 4 rewards of iteration 7 are missing; first reason: test: broken"
        )
        == 2
    )
    with pytest.raises(TooManyMissingRewards):
        rewards.check_failed_rewards({"reward/missing": 3.0}, local, 8)


def gathered():
    """Return the reasons and scores of two rewards of each rank, the second of which is missing."""
    mesh = ranks.start(1, CPU)
    first = 2 * mesh.rank
    local = {
        first + 1: Reward(math.nan, {"VQ": first + 0.5}, f"broken {mesh.rank}"),
        first: Reward(2.0, {"VQ": first + 1.5}),
    }
    found = gather_rewards(local, 2 * mesh.world_size, mesh)
    ranks.stop()
    return [[reward.reason for reward in found], [reward.scores["VQ"] for reward in found]]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_reward_that_is_missing_in_a_validation_keeps_its_reason_on_every_rank(num_ranks):
    reasons, scores = [None, "broken 0", None, "broken 1"], [1.5, 0.5, 3.5, 2.5]
    expected = [reasons[: 2 * num_ranks], scores[: 2 * num_ranks]]
    found = launch("tests.training.test_rewards:gathered", num_ranks)
    assert found == [expected] * num_ranks


def test_advantages_are_float32_from_rewards_in_float64(tiny_config, mesh):
    """The rewards differ by less than float32 can represent at 1000."""
    totals = dict(enumerate([1000.0, 1000.0, 1000.0, 1000.0 + 1e-6]))
    rewards = GroupRewards(
        tiny_config.reward,
        make_async_scorer(tiny_config, CPU, {}),
        mesh,
        group_size=4,
        num_rollouts=4,
    )
    indices = [RolloutIndex(0, member) for member in range(4)]
    advantages, _ = rewards.advantages(
        indices, {row: Reward(total, {}) for row, total in totals.items()}
    )
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx([-(3**-0.5)] * 3 + [3**0.5], rel=1e-1)


def test_normalized_rewards_change_the_advantages_and_not_the_record(tiny_config, mesh):
    """SIZE has 100 times the scale of TA; the reward of the last rollout is missing because a third
    scorer failed.
    """
    scores = [
        {"TA": a, "SIZE": b} for a, b in ((1.0, 100.0), (2.0, 300.0), (6.0, 200.0), (9.0, 900.0))
    ]
    local = {row: Reward(sum(each.values()), each) for row, each in enumerate(scores)}
    local[3] = Reward(math.nan, scores[3], "other: broken")
    indices, found = [RolloutIndex(0, member) for member in range(4)], {}
    for kind in ("none", "group"):
        config = tiny_config.with_settings(
            reward_weights='{"TA": 1, "SIZE": 1}', reward_normalization=kind
        )
        rewards = GroupRewards(
            config.reward, make_async_scorer(config, CPU, {}), mesh, group_size=4, num_rollouts=4
        )
        found[kind] = rewards.advantages(indices, local)
    metrics = {kind: dict(found[kind][1]) for kind in found}
    for each in metrics.values():
        del each["quantiles/advantage"]
    assert metrics["none"] == metrics["group"] and metrics["group"]["reward/mean"] == 203
    plain, normalized = (found[kind][0] for kind in ("none", "group"))
    assert plain.argsort()[:3].tolist() == [0, 2, 1] and plain[3].isnan()
    sums = torch.tensor([-2.0, -1.0, 3.0]) / math.sqrt(14 / 3) + torch.tensor(
        [-1.0, 1.0, 0.0]
    ) / math.sqrt(2 / 3)
    torch.testing.assert_close(normalized[:3], sums / sums.std(correction=0), rtol=1e-4, atol=1e-4)
    assert normalized[3].isnan()
    advantages, metrics = rewards.advantages(
        indices, dict.fromkeys(range(4), Reward(math.nan, {}, "no endpoint"))
    )
    assert advantages.isnan().all() and metrics["reward/missing"] == 4


def test_normalized_advantages_of_a_group_depend_on_its_own_rewards_alone(tiny_config, mesh):
    """Also of the first of two groups of three whose spreads differ."""
    rows = [{"TA": a, "SIZE": b} for a, b in ((1, 1), (2, 5), (6, 2), (0, 900), (70, 100), (20, 0))]
    local = {row: Reward(sum(scores.values()), scores) for row, scores in enumerate(rows)}
    indices = [RolloutIndex(row // 3, row % 3) for row in range(6)]
    config = tiny_config.with_settings(
        reward_weights='{"TA": 1, "SIZE": 1}', reward_normalization="group"
    )
    found = {}
    for count in (3, 6):
        scorer = make_async_scorer(config, CPU, {})
        rewards = GroupRewards(config.reward, scorer, mesh, group_size=3, num_rollouts=count)
        some = {row: local[row] for row in range(count)}
        found[count], _ = rewards.advantages(indices[:count], some)
    assert found[6][:3].tolist() == pytest.approx(found[3].tolist())
    first, second = (found[6][rows].tolist() for rows in (slice(3), slice(3, 6)))
    assert sorted(first) != pytest.approx(sorted(second), abs=0.1)


def test_settings_of_scoring_arrive_at_the_scorer(make_scorer, monkeypatch):
    settings = {
        "num_threads": 2,
        "offload": ["reward"],
    }
    settings |= {"reward_weights": '{"VQ": 2, "TA": -1}', "timeout": 50.0}
    for num_ranks, deadline in ((1, 1800.0), (2, 40.0)):
        monkeypatch.setattr("hyvideo.training.rewards.world_size", lambda num=num_ranks: num)
        _, scorer = make_scorer({"fixed": Fixed(VQ=1.0)}, **settings)
        assert (scorer.offload, scorer.deadline) == (True, deadline)
        assert scorer.weights == {"VQ": 2, "TA": -1}
        assert scorer._worker.submit(torch.get_num_threads).result() == 2


def missing_slow_rewards():
    """Return the number of missing rewards and a reason with a scorer on rank 1 that exceeds the
    collective timeout.
    """
    mesh, is_over = ranks.start(1, CPU, timeout=15.0), threading.Event()

    class Slow(Fixed):
        def score(self, videos, prompts, *, fps):
            assert mesh.rank == 0 or is_over.wait(25.0)
            return super().score(videos, prompts, fps=fps)

    config = load_config("configs/smoke.yaml", timeout=2.0, max_missing_fraction=0.5)
    scorer = make_async_scorer(config, CPU, {"test": Slow(VQ=1.0, MQ=1.0, TA=1.0)})
    rewards = GroupRewards(config.reward, scorer, mesh, group_size=4, num_rollouts=8)
    indices = [RolloutIndex(mesh.rank, member) for member in range(4)]
    clips = {row: torch.zeros(1, 3, 8, 8, dtype=torch.uint8) for row in range(4)}
    barrier(mesh)
    collected = rewards.wait(
        PendingRewards(clips, [scorer.submit(([*clips.values()], [PROMPT] * 4), fps=8)])
    )
    _, metrics = rewards.advantages(indices, collected)
    rewards.check_failed_rewards(metrics, collected, 1)
    is_over.set()
    return metrics["reward/missing"], collected[0].reason


@pytest.mark.system
def test_a_slow_reward_on_one_rank_is_missing_before_the_collectives_time_out():
    (missing, none), (same, reason) = launch("tests.training.test_rewards:missing_slow_rewards", 2)
    assert (
        missing == same == 4 and none is None and "no reward within the deadline of 1.6 s" in reason
    )


HELD_OUT = """
from hyvideo.rewards.rewards import FunctionScorer, Scorer
class Red(Scorer):
    dimensions, calls = ("red",), []
    def __init__(self, fails: bool = False):
        self.fails = fails
    def score(self, videos, prompts, *, fps):
        self.calls.append(prompts)
        return [{"red": float("nan") if self.fails else video[:, 0].float().mean().item()} for video in videos]
    def check_prompts(self, prompts):
        assert "a yellow square moves left" not in prompts
    def held_out_each(self, videos, prompts):
        return [{"seen": 1.0} for _ in videos]
"""


def test_a_held_out_scorer_measures_validations_only(tiny_config, mesh, tmp_path, capsys):
    """It is never called for rollouts, its scores do not enter the reward, and the hacking rule
    watches them.
    """
    (tmp_path / "red.py").write_text(HELD_OUT)
    name, prompts = (
        f"{tmp_path}/red.py:Red",
        [f"a {color} circle moves up" for color in ("red", "blue", "green")],
    )
    for file, rows in (("train.csv", ["a yellow square moves left"]), ("valid.csv", prompts)):
        (tmp_path / file).write_text("\n".join(["prompt", *rows]))
    settings = {
        "prompts_csv": str(tmp_path / "train.csv"),
        "valid_video_csv": str(tmp_path / "valid.csv"),
    }
    settings |= {
        "held_out_reward_model": [name],
        "validation_steps": 2,
        "pretrained_model_root": SHALLOW,
    }
    config = tiny_config.with_settings(**settings, validation_repeats=2, log_num_videos=0)
    check(config)
    trainer = Trainer(config, mesh, CPU)
    validation, trainer.iteration = trainer.validation, 1
    before, _, after = validation.run(0), trainer.run_iteration(), validation.run(1)
    (scorer,) = trainer.run.scorer.held_out_scorers.scorers.values()
    assert {*chain(*scorer.calls)} == {*prompts}
    for iteration, metrics in enumerate((before, after)):
        assert {n for n in metrics if "red" in n} == {"validation/held_out/Red/red"} and metrics[
            "validation/seen"
        ] == 1
        entries = json.loads((validation.folder(iteration) / "scores.json").read_text())
        values = [entry["held_out/Red/red"] for entry in entries]
        recorded = read_validation(validation.folder(iteration), validation.made_with)
        assert (
            recorded.means["held_out/Red/red"] == pytest.approx(statistics.fmean(values))
            and len({*values}) > 3
        )
        assert recorded.spreads["held_out/Red/red"] == pytest.approx((statistics.pstdev(values), 6))
        totals = [0.5 * entry["VQ"] + 0.5 * entry["MQ"] + entry["TA"] for entry in entries]
        assert [entry["reward"] for entry in entries] == pytest.approx(totals)
    base = read_validation(validation.folder(0), validation.made_with)
    worse = replace(
        base,
        iteration=1,
        means={n: v - 1e3 * (n == "held_out/Red/red") for n, v in base.means.items()},
    )
    assert [s.name for s in all_shifts(base, worse, 1.5) if s.is_bad] == ["held_out/Red/red"]

    options = json.dumps({name: {"fails": True}})
    scorer = make_async_scorer(config.with_settings(reward_config=options), CPU)
    clips = [torch.zeros(5, 3, 16, 16, dtype=torch.uint8)] * 2
    rewards = scorer.measure(clips, prompts[:2], fps=8)
    assert not any(reward.is_missing or reward.reason for reward in rewards)
    # NaN is a score that is not finite
    assert "2 of 2 videos lack held-out scores" not in capsys.readouterr().err
    scorer.held_out_scorers.scorers[name].score = None
    rewards = scorer.measure(clips, prompts[:2], fps=8)
    assert not any(
        reward.is_missing or reward.reason or "held_out/Red/red" in reward.scores
        for reward in rewards
    )
    assert "2 of 2 videos lack held-out scores; first reason: " in capsys.readouterr().err
    scorer.close()


def test_no_held_out_scorer_is_loaded_without_validation(tiny_config):
    scorer = make_async_scorer(tiny_config.with_settings(held_out_reward_model=["videoalign"]), CPU)
    assert scorer.held_out_scorers is None
    scorer.close()


MODULE = """
class Shade:
    dimensions = ("shade",)
    def score(self, videos, prompts, *, fps):
        return [{"shade": 1 - video.float().mean().item() / 255, "VQ": 2.0, "seen": "a word"} for video in videos]
    def check_prompts(self, prompts): ...
    def held_out(self, videos, prompts):
        return {}
"""


@pytest.mark.system
def test_a_custom_reward_from_the_docs_trains_and_its_scores_are_recorded(
    tiny_config, mesh, tmp_path, monkeypatch
):
    """It is combined with a reward from a module.

    The run resumes only if their files are unchanged.
    """
    page = Path("docs/rewards.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(def brightness.*?)```", page, re.S)
    (as_class,) = re.findall(r"```python\n(from \S+ import Scorer\n.*?)```", page, re.S)
    example += as_class
    (flags,) = re.findall(r"post_train.py .*\\\n +(--reward_model my_rewards.py.*)\n", page)
    (tmp_path / "my_rewards.py").write_text(example)
    (tmp_path / "shades.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    root = Path(tiny_config.model.pretrained_model_root).resolve()
    monkeypatch.chdir(tmp_path)
    parsed = parse(shlex.split(flags)).config
    config = tiny_config.with_settings(
        **{
            "pretrained_model_root": str(root),
            "reward_weights": json.dumps(reward_weights(parsed.reward)),
        },
        reward_model=[*parsed.reward.reward_model, "shades:Shade"],
        **{"valid_video_csv": "assets/miniature/prompts/smoke.csv", "validation_steps": 2},
        **{
            "max_steps": 1,
            "validation_interval": 1,
            "save_interval": 1,
            "log_video_interval": 1,
            "log_num_videos": 1,
        },
    )
    check(config)
    trainer = Trainer(config, mesh, CPU)
    trainer.train()
    (line,) = read_metrics(tmp_path / "run/metrics.jsonl")
    assert line["reward/mean"] == line["reward/brightness"] > 0
    assert line["reward/brightness"] == pytest.approx(1 - line["reward/shade"])
    assert line["reward/VQ"] == line["validation/VQ"] == 2 and "reward/MQ" not in line
    (scores,) = (tmp_path / "run" / "rollouts").glob("000001/scores.json")
    assert all(
        {"brightness", "shade", "VQ"} < entry.keys() for entry in json.loads(scores.read_text())
    )

    config = config.with_settings(max_steps=2)
    Trainer(config, mesh, CPU)
    (tmp_path / "my_rewards.py").write_text(example.replace("255", "256"))
    with pytest.raises(ValueError, match="--allow_changed_settings reward_model$"):
        Trainer(config, mesh, CPU)


def test_a_function_that_returns_several_scores_is_used_beside_another_scorer(make_scorer):
    """Its dimensions are those of its first answer."""

    def light(videos, prompts, fps):
        return [{"dark": 2.0, "bright": 3.0} for _ in videos]

    scorers = {"m.py:light": FunctionScorer(light, "light", {}), "other": Fixed(VQ=5.0)}
    scorers["other"].dimensions = ("VQ",)
    weights = '{"m.py:light": {"dark": 1, "bright": 10}, "other": {"VQ": 100}}'
    config, scorer = make_scorer(scorers, reward_weights=weights)
    try_scorers(scorer, config.data, PROMPT)
    (reward,) = scorer.measure([torch.zeros(5, 3, 16, 16, dtype=torch.uint8)], [PROMPT], fps=8)
    assert reward.total == 532.0
