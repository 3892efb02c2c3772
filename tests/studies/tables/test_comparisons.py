"""Paired differences between rows of Table 2, and the verdicts on them."""

import math
from dataclasses import replace

import pytest

from hyvideo.data.prompts import Request
from hyvideo.validation.intervals import t_quantile
from hyvideo.validation.scores_file import Evaluation, mark_seen
from studies.recipes.runs import RecipeRun
from studies.tables.cells import Cell
from studies.tables.comparisons import as_markdown
from studies.tables.table2 import COMPARED, NOTES, comparisons_of

SAGE, FLOW = (Cell("B", method, "dual_moving", True) for method in ("sage_grpo", "flow_grpo"))
# effect of each prompt, much larger than differences between policies
DIFFICULTY = (0.0, 5.0, -3.0, 1.0)
LUCK = (0.3, -0.4, 0.2)  # effect of each seed, the same for both policies


def evaluation(seed, gain=0.0, *, frechet=None, missing=()):
    """Return an evaluation with a video of each prompt; ``gain`` is added to TA, whose weight in
    setting B is 1.
    """
    ta = {group: level + LUCK[seed] + gain for group, level in enumerate(DIFFICULTY)}
    videos = [
        {
            "number": group,
            "prompt": f"prompt {group}",
            "group": group,
            "VQ": 0.2,
            "MQ": 0.4,
            "TA": value,
        }
        for group, value in ta.items()
    ]
    for group in missing:
        videos[group]["TA"] = None
    return Evaluation(videos, {} if frechet is None else {"frechet_distance": frechet})


def by_run(cell, evaluations):
    return {RecipeRun(cell, seed): e for seed, e in evaluations.items()}


def sage_against_flow(sage, flow):
    evaluations = by_run(FLOW, flow) | by_run(SAGE, sage)
    (comparison,) = comparisons_of(evaluations)
    return comparison


def test_pairing_removes_effects_that_both_runs_share():
    gains = (0.10, 0.12, 0.11)
    found = sage_against_flow(
        {seed: evaluation(seed, gain, frechet=0.1 * seed) for seed, gain in enumerate(gains)},
        {seed: evaluation(seed, frechet=0.0) for seed in range(3)},
    )
    reward, half_width = found.differences["Reward"], t_quantile(2) * 0.01 / math.sqrt(3)
    assert (reward.mean, reward.high - reward.mean) == pytest.approx((0.11, half_width))
    frechet = found.differences["Frechet distance"]
    assert (frechet.mean, frechet.high - frechet.mean) == pytest.approx((0.1, 10 * half_width))
    assert (
        found.question == "SAGE-GRPO against FlowGRPO, dual moving KL, equalizer"
        and found.seeds == [0, 1, 2]
    )
    assert found.verdict("Reward") == "higher" and "True reward" not in found.differences


@pytest.mark.parametrize(
    "gains, reading",
    [
        ((-0.10, -0.12, -0.11), "lower"),
        ((0.03, 0.12, -0.02), "no significant difference"),
        ((0.5,), "one seed: no verdict"),
    ],
)
def test_a_verdict_needs_two_seeds_and_an_interval_without_0(gains, reading):
    found = sage_against_flow(
        {seed: evaluation(seed, gain) for seed, gain in enumerate(gains)},
        {seed: evaluation(seed) for seed in range(3)},
    )
    assert found.verdict("Reward") == reading and f"| {reading} |" in as_markdown(
        [found], COMPARED, NOTES
    )


def test_a_difference_on_unseen_prompts_excludes_the_training_prompts():
    training = [Request("prompt 0"), Request("Prompt 3")]
    sage, flow = evaluation(0, 0.1), evaluation(0)
    for group in (1, 2):
        sage.videos[group]["TA"] += 0.4
    found = sage_against_flow(
        {0: mark_seen(sage, training)}, {0: mark_seen(flow, training)}
    ).differences
    assert (found["Reward"].mean, found["Reward, unseen prompts"].mean) == pytest.approx((0.3, 0.5))
    unsplit = sage_against_flow({0: sage}, {0: mark_seen(flow, [Request("another prompt")])})
    assert "Reward, unseen prompts" not in unsplit.differences


def test_only_common_seeds_and_videos_are_compared():
    found = sage_against_flow(
        {0: evaluation(0, 0.1), 1: evaluation(1, 0.3, missing=[1])},
        {1: evaluation(1, missing=[2]), 2: evaluation(2)},
    )
    assert found.seeds == [1] and found.differences["Reward"].mean == pytest.approx(0.3)
    none = sage_against_flow({0: evaluation(0)}, {1: evaluation(1)})
    assert none.verdict("Reward") == "no common seed: no verdict" and not none.differences


def test_settings_are_compared_separately_with_their_weights():
    evaluations = {}
    for setting in "AB":
        for cell, vq in ((SAGE, 1.2), (FLOW, 0.2)):
            scored = evaluation(0)
            for entry in scored.videos:
                entry["VQ"] = vq
            evaluations[RecipeRun(replace(cell, setting=setting), 0)] = scored
    found = {c.setting: c.differences["Reward"].mean for c in comparisons_of(evaluations)}
    assert found == pytest.approx({"A": 1.0, "B": 0.5})
