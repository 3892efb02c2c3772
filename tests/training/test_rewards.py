"""Which rewards the settings ask for, and that one which cannot be trained with is said so before a run."""

import json
import math
import re
import shlex
import threading
from pathlib import Path

import pytest
import torch

from hyvideo.config.command_line import load_config, parse
from hyvideo.config.rules import check
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.collectives import barrier
from hyvideo.evaluation import run_summary
from hyvideo.models.reward_models.rewards import Reward
from hyvideo.trainer import Trainer
from hyvideo.training.rewards import GroupRewards, TooManyMissingRewards, make_async_scorer, try_scorers
from hyvideo.training.rollout_batch import RolloutIndex
from hyvideo.training.rollout_collector import PendingRewards
from tests.distributed.launch import launch

CPU = torch.device("cpu")
PROMPT = "a red circle moves up"


class Fixed:
    """Always the same scores."""

    def __init__(self, **scores):
        self.scores = scores

    def score(self, videos, prompts, *, fps):
        return [dict(self.scores) for _ in videos]

    def check_prompts(self, prompts):
        pass

    def held_out(self, videos, prompts):
        return {}


@pytest.fixture
def scorer_of(tiny_config):
    scorers_made = []

    def make(scorers=None, **settings):
        config = tiny_config.with_settings(**settings)
        scorers_made.append(make_async_scorer(config, CPU, scorers))
        return config, scorers_made[-1]

    yield make
    for scorer in scorers_made:
        scorer.close()


def test_the_settings_name_scorers_and_their_options(scorer_of, tmp_path):
    _, scorer = scorer_of()
    assert list(scorer.scorers) == ["miniature"] and scorer.weights == {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}
    options = tmp_path / "rewards.yaml"
    options.write_text("miniature: {path: nowhere}\n")
    _, scorer = scorer_of(reward_config=str(options))
    assert scorer.scorers["miniature"].reference is None


@pytest.mark.parametrize(
    "text, said",
    [
        ("videoalign: {}", "options for miniature, got 'videoalign'"),
        ("miniature: 3", "options for miniature, got 'miniature'"),
        ("- a", "options for miniature, got ''"),
        ("miniature: {device: cuda}", "has device for miniature, which the run decides"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_options_of_no_scorer_are_refused(scorer_of, tmp_path, text, said):
    options = tmp_path / "rewards.yaml"
    options.write_text(text)
    with pytest.raises(ValueError, match=said):
        scorer_of(reward_config=str(options))


def test_an_option_that_a_scorer_does_not_have_is_refused(scorer_of, tmp_path):
    options = tmp_path / "rewards.yaml"
    options.write_text("miniature: {beauty: 1}\n")
    with pytest.raises(ValueError, match="miniature has no option beauty"):
        scorer_of(reward_config=str(options))


def test_a_measure_of_a_set_that_is_a_number_is_refused_before_a_run_that_validates(scorer_of):
    class OfAnEarlierVersion(Fixed):
        def held_out(self, videos, prompts):
            return {"brightness": 0.5}

    config, scorer = scorer_of({"mine": OfAnEarlierVersion(VQ=1.0, MQ=1.0, TA=1.0)})
    try_scorers(scorer, config.data, PROMPT)
    config = config.with_settings(valid_video_csv="prompts.csv")
    with pytest.raises(ValueError, match="held_out of reward mine must return a dict of SetMeasure.*brightness"):
        try_scorers(scorer, config.data, PROMPT)


def test_an_offloaded_scorer_is_tried_where_it_scores(scorer_of):
    class Movable(Fixed):
        places = []

        def move_to(self, device):
            self.places.append(device)

        def score(self, videos, prompts, *, fps):
            assert self.places[-1] is None
            return super().score(videos, prompts, fps=fps)

    mine = Movable(VQ=1.0, MQ=1.0, TA=1.0)
    config, scorer = scorer_of({"mine": mine}, reward_offload=True)
    try_scorers(scorer, config.data, PROMPT)
    assert mine.places == ["cpu", None, "cpu"]


def test_a_good_scorer_passes(scorer_of):
    config, scorer = scorer_of()
    try_scorers(scorer, config.data, PROMPT)


@pytest.mark.parametrize(
    "scorer, said",
    [
        (Fixed(VQ=1.0, MQ=1.0), "TA"),
        (Fixed(VQ=1.0, MQ=math.nan, TA=1.0), "MQ"),
    ],
)
def test_a_scorer_without_a_dimension_that_counts_is_refused(scorer_of, scorer, said):
    config, scorer = scorer_of({"bad": scorer})
    with pytest.raises(ValueError, match=f"(?s)reward bad cannot be trained with.*{said}"):
        try_scorers(scorer, config.data, PROMPT)


def test_a_scorer_that_does_not_repeat_itself_is_refused(scorer_of):
    class Random(Fixed):
        def score(self, videos, prompts, *, fps):
            return [{name: torch.rand(()).item() for name in ("VQ", "MQ", "TA")} for _ in videos]

    config, scorer = scorer_of({"random": Random()})
    with pytest.raises(ValueError, match="reward random cannot be trained with"):
        try_scorers(scorer, config.data, PROMPT)


def test_a_run_stops_above_its_fraction_of_missing_rewards_and_not_at_it(tiny_config, mesh):
    local = dict(enumerate([Reward(math.nan, {}, "test: broken")] + [Reward(1.0, {})] * 3))
    rewards = GroupRewards(
        tiny_config.reward, make_async_scorer(tiny_config, CPU, {}), mesh, group_size=4, num_rollouts=4
    )
    rewards.refuse_too_many_missing({"reward/missing": 1.0}, local, 7)
    with pytest.raises(TooManyMissingRewards, match="2 of 4 rewards of iteration 7 are missing.*test: broken"):
        rewards.refuse_too_many_missing({"reward/missing": 2.0}, local, 7)


def a_slow_reward():
    """Missing rewards of a round in which the scorer of rank 1 takes longer than any collective may; one reason."""
    mesh, is_over = ranks.start(1, CPU, timeout=15.0), threading.Event()

    class Slow(Fixed):
        def score(self, videos, prompts, *, fps):
            assert mesh.rank == 0 or is_over.wait(25.0)
            return super().score(videos, prompts, fps=fps)

    config = load_config("configs/smoke.yaml", collective_timeout=2.0, max_missing_fraction=0.5)
    scorer = make_async_scorer(config, CPU, {"test": Slow(VQ=1.0, MQ=1.0, TA=1.0)})
    rewards = GroupRewards(config.reward, scorer, mesh, group_size=4, num_rollouts=8)
    indices = [RolloutIndex(mesh.rank, member) for member in range(4)]
    clips = {row: torch.zeros(1, 3, 8, 8, dtype=torch.uint8) for row in range(4)}
    barrier(mesh)
    given = rewards.wait(PendingRewards(clips, [scorer.submit([*clips.values()], [PROMPT] * 4, fps=8)]))
    _, metrics = rewards.advantages(indices, given)
    rewards.refuse_too_many_missing(metrics, given, 1)
    is_over.set()
    return metrics["reward/missing"], given[0].reason


def test_a_reward_that_is_slow_on_one_rank_is_missing_before_the_others_give_up():
    (missing, none), (same, reason) = launch("tests.training.test_rewards:a_slow_reward", 2)
    assert missing == same == 4 and none is None and "no reward within 1.6 s" in reason


def test_a_policy_that_diverged_is_called_so(tiny_config, mesh):
    config = tiny_config.with_settings(learning_rate=1e6, num_updates_per_rollout=2, max_steps=3, lora_rank=2)
    told = "of iteration 2 are missing.*The policy has diverged: loss or gradient left the usual range in iteration 1"
    with pytest.raises(TooManyMissingRewards, match=told):
        Trainer(config, mesh, CPU, scorers={"test": Fixed(VQ=1.0, MQ=1.0, TA=1.0)}).train()


MODULE = """
class Shade:
    dimensions = ("shade",)
    def score(self, videos, prompts, *, fps):
        return [{"shade": 1 - video.float().mean().item() / 255, "VQ": 2.0, "seen": "a word"} for video in videos]
    def check_prompts(self, prompts): ...
    def held_out(self, videos, prompts):
        return {}
"""


def test_the_own_reward_of_the_docs_trains_beside_one_of_a_module_and_all_shows_what_was_scored(
    tiny_config, mesh, tmp_path, monkeypatch, capsys
):
    """And goes on with the same file only."""
    page = Path("docs/own_reward.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from \S+ import Scorer\n\n\nclass Brightness.*?)```", page, re.S)
    (flags,) = re.findall(r"post_train.py .*\\\n +(--reward_model .*)\n", page)
    (tmp_path / "my_rewards.py").write_text(example)
    (tmp_path / "shades.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    root = Path(tiny_config.model.pretrained_model_root).resolve()
    monkeypatch.chdir(tmp_path)
    asked = parse(shlex.split(flags)).config
    config = tiny_config.with_settings(
        **{"pretrained_model_root": str(root), "reward_weights": json.dumps(asked.reward_weights)},
        reward_model=[*asked.reward.reward_model, "shades:Shade"],
        reward_config='{"my_rewards.py:Brightness": {"target": 0.5}}',
        **{"valid_video_csv": "assets/miniature/prompts/smoke.csv", "validation_steps": 2},
        **{"max_steps": 1, "validation_interval": 1, "save_interval": 1, "log_video_interval": 1, "log_num_videos": 1},
    )
    check(config)
    trainer = Trainer(config, mesh, CPU)
    trainer.train()
    run_summary.print_summary(tmp_path / "run", 1, trainer.validation)
    (line,) = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    own = {"brightness", "shade", "VQ"}
    assert {f"reward/{name}" for name in (*own, "mean", "std", "missing")} == {
        n for n in line if n.startswith("reward/")
    }
    assert line["reward/mean"] == line["reward/brightness"] < 0 < line["reward/shade"] and line["reward/VQ"] == 2
    assert {f"validation/{name}" for name in own} < line.keys() and not {
        "validation/MQ",
        "validation/Overall",
    } & line.keys()
    for scores in (tmp_path / "run").glob("*/000001/scores.json"):
        assert all(
            own < entry.keys() and not {"MQ", "Overall"} & entry.keys() for entry in json.loads(scores.read_text())
        )
    said = capsys.readouterr().out
    assert re.search(r" brightness +-0\.", said) and re.search(r" VQ +2\.000", said) and "nan" not in said

    config = config.with_settings(max_steps=2, resume_from_checkpoint="latest")
    Trainer(config, mesh, CPU)
    (tmp_path / "my_rewards.py").write_text(example.replace("255", "256"))
    with pytest.raises(ValueError, match=r"contents of reward_model my_rewards.py, \S+shades.py have changed"):
        Trainer(config, mesh, CPU)
