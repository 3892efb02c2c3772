"""The tutorial: each part equals the project's function, and an iteration trains the policy."""

from functools import partial

import pytest

from examples import grpo_from_scratch as tutorial


@pytest.mark.parametrize("part", ["sampler", "advantages", "equalizer", "grpo", "nft"])
def test_a_part_equals_the_function_of_the_project(part):
    getattr(tutorial, f"check_{part}")()


def test_a_reader_can_add_a_sampler(monkeypatch):
    """As exercise 5 asks: the checks compare only samplers that the project has."""
    monkeypatch.setitem(tutorial.SAMPLERS, "falling", lambda s, t: s * (s - t))
    tutorial.check_sampler(), tutorial.check_equalizer()


@pytest.mark.system
@pytest.mark.parametrize(
    "objective, sampler",
    [("grpo", "sage_grpo"), pytest.param("nft", "dance_grpo", marks=pytest.mark.slow)],
)
def test_the_tutorial_trains_and_draws_its_curve(
    objective, sampler, tmp_path, monkeypatch, exit_code, capsys
):
    """One iteration of 4 rollouts of two prompts, with two updates; then the anchor moves, which
    `train` checks.
    """
    monkeypatch.setattr(tutorial, "REFRESH", 1)
    small = partial(tutorial.train, captions=tutorial.CAPTIONS[:2], num_prompts=2, group_size=2)
    monkeypatch.setattr(tutorial, "train", small)
    monkeypatch.setattr(tutorial, "OUT", tmp_path / "new")
    words = "--objective", objective, "--sampler", sampler, "--iterations", "1", "--seed", "3"
    assert exit_code(tutorial.main, *words) == 0
    before, after = capsys.readouterr().out.splitlines()
    assert before.startswith("iteration  0: reward 1.") and after.startswith(
        "iteration  1: reward "
    )
    assert before.split()[2:] != after.split()[2:]
    assert (tmp_path / "new" / f"{objective}_{sampler}_3.png").read_bytes().startswith(b"\x89PNG")
