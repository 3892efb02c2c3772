"""Paired comparison of the scores of two policies."""

import json

import numpy as np
import pytest

from hyvideo.validation.paired import paired_gain, paired_gains, read_scores
from scripts.compare_policies import compare_scores


def video(number, score, *, prompt=None, seed=930, missing=False):
    return {
        "number": number,
        "prompt": prompt or f"prompt {number // 2}",
        "seed": seed,
        "group": number // 2,
        "file": None,
        "reward": None if missing else score,
        "HPSv3": None if missing else 2 * score,
        "advantage": None,
        "missing": missing,
        "reason": "",
    }


BASE = [1.0, 2.0, 3.0, 10.0]
POLICY = [4.0, 2.0, 4.0, 9.0]


def of(scores):
    return [video(number, score) for number, score in enumerate(scores)]


def test_gains_wins_and_parts_are_those_of_the_definition():
    gains = paired_gains(of(BASE), of(POLICY))
    assert list(gains) == ["reward", "HPSv3"]
    gain = gains["reward"]
    assert gain.base == 4 and gain.over_pairs.mean == gain.over_prompts.mean == 0.75
    assert gain.wins == (1 + 0.5 + 1 + 0) / 4
    assert gain.below == (pytest.approx(4 / 3), 3) and gain.above == (-1, 1)
    assert gains["HPSv3"].over_pairs.mean == 1.5


def test_a_missing_score_leaves_out_its_pair():
    policy = of(POLICY)
    policy[0] = video(0, 4.0, missing=True)
    gain = paired_gains(of(BASE), policy)["reward"]
    assert gain.num_pairs == 3 and gain.over_pairs.mean == 0


def test_the_interval_over_pairs_is_that_of_the_normal_distribution_for_many_pairs():
    gains = np.random.default_rng(1).normal(0.3, 2, size=2000)
    base = np.random.default_rng(2).normal(size=2000)
    found = paired_gain([str(number) for number in range(2000)], base, base + gains).over_pairs
    half = 1.96 * gains.std() / 2000**0.5
    assert found.low == pytest.approx(gains.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(gains.mean() + half, abs=0.1 * half)


def test_videos_of_a_prompt_that_gain_alike_widen_the_interval_over_prompts():
    of_prompt = np.random.default_rng(3).normal(size=200)
    gain = paired_gain(list("abcdefghij" * 40)[:400], np.zeros(400), np.tile(of_prompt, 2))
    alike = paired_gain(
        [str(number) for number in range(200)] * 2, np.zeros(400), np.tile(of_prompt, 2)
    )
    assert gain.over_pairs == alike.over_pairs
    width = alike.over_prompts.high - alike.over_prompts.low
    assert width == pytest.approx(2**0.5 * (alike.over_pairs.high - alike.over_pairs.low), rel=0.1)


@pytest.mark.parametrize("other", [{"seed": 931}, {"prompt": "another"}])
def test_videos_with_other_noise_or_prompts_are_not_paired(other):
    policy = of(POLICY)
    policy[2] = video(2, 4.0, **other)
    with pytest.raises(ValueError, match="validation_seed"):
        paired_gains(of(BASE), policy)


def test_scores_of_validations_and_of_evaluations_are_read(tmp_path):
    for name, content in {"base": of(BASE), "policy": {"of": {}, "videos": of(POLICY)}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.json").write_text(json.dumps(content))
    assert read_scores(tmp_path / "policy") == of(POLICY)
    table = compare_scores([f"base={tmp_path / 'base'}", f"sage={tmp_path / 'policy'}"])
    assert "| sage | reward | 4 | 4.000 | +0.750 |" in table and "62 %" in table


def test_one_policy_alone_is_refused(tmp_path):
    (tmp_path / "scores.json").write_text(json.dumps(of(BASE)))
    with pytest.raises(ValueError, match="policy"):
        compare_scores([f"base={tmp_path}"])
